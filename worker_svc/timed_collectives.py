"""A plugin's collectives with a clock beside each, which stands still until somebody profiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.collectives import Collectives, Pending
from plugins.sdk.timing import COMMUNICATION, OperatorRun, OperatorTimes, StopTiming, TimedOperator, TimingLog

NOTE = (
    "each operator was waited for until the chip had ended it, sums under way included: how much of the "
    "communication lies behind computing unwatched was not seen"
)


class TimedCollectives:
    """`collectives`, to be used in place of those of a plugin; `start` has its calls timed from then on.

    sees_overlap: whether computing runs on the calling thread, so that operators need not be waited for.
    """

    def __init__(self, plain: Collectives, *, sees_overlap: bool) -> None:
        self._watched = _Watched(plain)
        self._sees_overlap = sees_overlap

    @property
    def collectives(self) -> Collectives:
        """The plugin's, with a clock beside."""
        return self._watched

    def start(self, *, most_runs: int) -> StopTiming:
        """Time all calls from now on; one that is under way at the end is left out."""
        log = TimingLog(most_runs)
        self._watched._log = log

        def stop() -> OperatorTimes:
            self._watched._log = None
            return log.times(notes=[NOTE] if log.runs and not self._sees_overlap else [])

        return stop


class _Watched(Collectives):
    """Passes all on. _log: None while nobody profiles."""

    def __init__(self, plain: Collectives) -> None:
        self._plain = plain
        self._log: TimingLog | None = None

    @property
    def library(self) -> str:
        """As the plugin says."""
        return self._plain.library

    def init_group(self, name: str, *, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
        """As the plugin does; not timed, nor are the other calls outside of steps."""
        self._plain.init_group(
            name, rank=rank, world_size=world_size, rendezvous=rendezvous, timeout_s=timeout_s
        )

    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """As the plugin does."""
        return self._timed(
            "all_reduce", name, tensor, lambda: self._plain.all_reduce(name, tensor, timeout_s=timeout_s)
        )

    def begin_all_reduce(
        self, name: str, tensor: Any, *, algorithm: str = "", timeout_s: float | None = None
    ) -> Pending:
        """As the plugin does; a run lasts from the beginning to the end of the wait."""
        log, begun_s = self._log, time.monotonic()
        pending = self._plain.begin_all_reduce(name, tensor, algorithm=algorithm, timeout_s=timeout_s)
        if log is None:
            return pending
        operator = self._operator("all_reduce", algorithm or self._plain.algorithm(name, _size(tensor)))
        begun = OperatorRun(operator, begun_s, 0.0, _size(tensor))
        starting_s = time.monotonic() - begun_s
        return _Watching(pending, partial(self._take_down, log), begun, starting_s=starting_s)

    def algorithms(self) -> Sequence[str]:
        """As the plugin says."""
        return self._plain.algorithms()

    def algorithm(self, name: str, size_bytes: int) -> str:
        """As the plugin says."""
        return self._plain.algorithm(name, size_bytes)

    def all_gather(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """As the plugin does."""
        return self._timed(
            "all_gather", name, tensor, lambda: self._plain.all_gather(name, tensor, timeout_s=timeout_s)
        )

    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """As the plugin does."""
        return self._timed(
            "reduce_scatter",
            name,
            tensor,
            lambda: self._plain.reduce_scatter(name, tensor, timeout_s=timeout_s),
        )

    def broadcast(self, name: str, tensor: Any, *, root: int, timeout_s: float | None = None) -> Any:
        """As the plugin does."""
        return self._timed(
            "broadcast",
            name,
            tensor,
            lambda: self._plain.broadcast(name, tensor, root=root, timeout_s=timeout_s),
        )

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """As the plugin does."""
        self._timed("barrier", name, None, lambda: self._plain.barrier(name, timeout_s=timeout_s))

    def destroy_group(self, name: str) -> None:
        """As the plugin does."""
        self._plain.destroy_group(name)

    def topology(self) -> Sequence[LinkCapability]:
        """As the plugin says."""
        return self._plain.topology()

    def _take_down(self, log: TimingLog, run: OperatorRun) -> None:
        """A run has ended; it counts while `log` is the one in use."""
        if self._log is log:
            log.add_run(run)

    def _timed(self, primitive: str, name: str, tensor: Any, call: Callable[[], Any]) -> Any:
        log = self._log
        if log is None:
            return call()
        algorithm = self._plain.algorithm(name, _size(tensor)) if primitive == "all_reduce" else ""
        begun_s = time.monotonic()
        outcome = call()
        seconds = time.monotonic() - begun_s
        log.add_run(OperatorRun(self._operator(primitive, algorithm), begun_s, seconds, _size(tensor)))
        return outcome

    def _operator(self, primitive: str, algorithm: str) -> TimedOperator:
        program = f"{self._plain.library}, {algorithm}" if algorithm else self._plain.library
        return TimedOperator(primitive, COMMUNICATION, native=True, program=program)


class _Watching(Pending):
    """A sum whose first wait is told. starting_s: what it took to begin."""

    def __init__(
        self, pending: Pending, tell: Callable[[OperatorRun], None], begun: OperatorRun, *, starting_s: float
    ) -> None:
        self._pending = pending
        self._tell = tell
        self._begun = begun
        self._starting_s = starting_s
        self._was_told = False

    def wait(self) -> Any:
        """As the plugin's."""
        waited_from_s = time.monotonic()
        outcome = self._pending.wait()
        if not self._was_told:
            self._was_told = True
            end_s, begun_s = time.monotonic(), self._begun.begin_s
            held_s = self._starting_s + end_s - waited_from_s
            self._tell(replace(self._begun, seconds=end_s - begun_s, waited_s=held_s))
        return outcome


def _size(tensor: Any) -> int:
    """Bytes of this rank's input; 0 for none."""
    return 0 if tensor is None else int(tensor.numel() * tensor.element_size())
