"""One profile at a time of one executor, from the request to the trace; the device goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from google.protobuf.duration_pb2 import Duration

from meshkit.errors import AlreadyExists, InvalidArgument
from worker_svc.device_thread import DeviceThread
from worker_svc.profile.recorder import Recording
from worker_svc.profile.spans import emit_class_spans
from worker_svc.profile.summary import summarise
from worker_svc.profile.trace import write_trace
from worker_svc.step_engine import StepEngine

MOST_SECONDS = 60.0


class Profiling:
    """facts: of the executor (worker, chip, model), for the trace's title."""

    def __init__(self, engine: StepEngine, device: DeviceThread, *, facts: Mapping[str, str]) -> None:
        self._engine = engine
        self._device = device
        self._facts = dict(facts)
        self._is_running = False

    async def run(self, duration: Duration) -> bytes:
        """Record for `duration` and return the trace. A caller that leaves ends it.

        Raises:
            InvalidArgument: (duration) not above 0, or too long. AlreadyExists: a profile is running.
            FailedPrecondition: no model is loaded. Unavailable: the device failed.
        """
        seconds = check_duration(duration)
        if self._is_running:
            raise AlreadyExists(
                "this executor is being profiled already; wait for the end of that profile, which takes at "
                f"most {MOST_SECONDS:g} s",
                reason="PROFILE_RUNNING",
            )
        self._is_running = True
        try:
            recording = await self._record(seconds)
        finally:
            self._is_running = False
        return await asyncio.to_thread(self._tell, recording)

    def _tell(self, recording: Recording) -> bytes:
        """The trace, and its classes as spans of the call; off the event loop, which has steps to pass on."""
        summary = {**self._facts, **summarise(recording)}
        emit_class_spans(summary, begin_s=recording.begin_s)
        return write_trace(recording, summary)

    async def _record(self, seconds: float) -> Recording:
        await self._device.submit(self._engine.start_profile)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            # Not awaited: whoever is cancelled twice would leave the clocks running.
            self._device.submit(self._engine.stop_profile)
            raise
        return await self._device.submit(self._engine.stop_profile)


def check_duration(duration: Duration) -> float:
    """Seconds of a duration.

    Raises:
        InvalidArgument: (duration) it is not above 0, or more than MOST_SECONDS.
    """
    seconds = float(duration.seconds + duration.nanos * 1e-9)
    if not 0.0 < seconds <= MOST_SECONDS:
        raise InvalidArgument(
            f"duration is {seconds:g} s; more than 0 and at most {MOST_SECONDS:g} are allowed",
            field="duration",
        )
    return seconds
