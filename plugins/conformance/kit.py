"""The whole run: starts a back end by name, or asks an executor by address, and checks its duties in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from meshkit.errors import MeshError
from plugins.conformance.checks_capabilities import check_capabilities, native_operators
from plugins.conformance.checks_collectives import check_collectives, check_one_rank
from plugins.conformance.checks_device import check_devices
from plugins.conformance.checks_memory import check_memory
from plugins.conformance.recorder import Recorder
from plugins.conformance.remote import OUT_OF_REACH, open_executor
from plugins.conformance.report import Report, Result, Status
from plugins.conformance.time_limit import TimeLimit
from plugins.sdk.backend import Backend
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.registry import read_info, start_backend

T = TypeVar("T")

AREAS = ("capabilities", "device", "memory", "operators", "collectives")
NO_HARDWARE = ("NO_DEVICE", "RUNTIME_ABSENT")
"""Reasons of the MeshError with which a factory says that the chip, or its runtime, is not here."""
LOAD = "load"
"""Name under which a start that hangs is reported; one that ends is no check of its own."""
CAN_BE_READ = "capabilities/can_be_read"


@dataclass(frozen=True)
class Limits:
    """Seconds that each check may take, and what is done with the report once one takes longer.

    on_hang: called on a thread of its own while the check still runs; the report has the hang as a FAIL and
        all that was not run as skips. It is expected to end the process.
    """

    seconds: float
    on_hang: Callable[[Report], None]


def run_conformance(
    name: str,
    options: Mapping[str, str] | None = None,
    *,
    only: str = "",
    quick: bool = False,
    limits: Limits | None = None,
) -> Report:
    """Check one back end.

    only: run checks whose name contains it. quick: leave heavy shape classes out; the coverage shows it.

    Raises:
        UnknownBackend: no back end has that name.
        MeshError: the back end does not start. A factory that raises with a reason of NO_HARDWARE makes a
            report of skips instead.
    """
    run = _Run(name, only=only, limits=limits)
    try:
        # Not load_backend: what it would refuse is to be shown, each fault under the name of its check.
        backend = run.start(partial(start_backend, name, options or {}))
    except MeshError as error:
        if error.reason not in NO_HARDWARE:
            raise
        return run.without_hardware(error.message)
    ranks = partial(check_collectives, name=name, options=options or {}, limit_s=_seconds(limits))
    return run.check(backend, ranks, quick=quick)


def run_conformance_at(
    address: str, *, only: str = "", quick: bool = False, limits: Limits | None = None
) -> Report:
    """Check the plugin of a running executor over the device-plugin RPCs; `address`: "HOST:PORT" or
    "unix:PATH". What they do not show is skipped with the reason, never passed. Parameters as
    `run_conformance`.

    Raises:
        MeshError: nobody answers there, or not as an executor.
    """
    run = _Run("", only=only, limits=limits, out_of_reach=OUT_OF_REACH)
    with open_executor(address, limit_s=_seconds(limits)) as backend:
        run.name = run.start(backend.info).name
        run.identity["address"] = address
        return run.check(backend, check_one_rank, quick=quick)


def identify(backend: Backend) -> dict[str, Any]:
    """Who was checked, as the plugin says it."""
    info, report = backend.info(), backend.capabilities()
    return {
        "chip": report.chip,
        "emulated": report.emulated,
        "emulation_note": report.emulation_note,
        "accumulation_dtype": report.accumulation_dtype,
        "plugin_version": info.plugin_version,
        "contract_version": info.contract_version,
        "runtime_version": info.runtime_version,
        "collective_library_version": info.collective_library_version,
        "framework_version": info.framework_version,
    }


class _Run:
    """One run: its recorder, and what is known of who is checked so far."""

    def __init__(
        self, name: str, *, only: str, limits: Limits | None, out_of_reach: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.identity: dict[str, Any] = {}
        self._limits = limits
        self._limit = None if limits is None else TimeLimit(limits.seconds, self._give_up)
        self._recorder = Recorder(only, limit=self._limit, out_of_reach=out_of_reach)
        self._recorder.expect_areas(AREAS)
        self._device_count = 0

    def start(self, call: Callable[[], T]) -> T:
        """Run what comes before all checks: within the limit too."""
        if self._limit is None:
            return call()
        with self._limit.watch(LOAD):
            return call()

    def check(
        self, backend: Backend, check_ranks: Callable[[Backend, Recorder], None], *, quick: bool
    ) -> Report:
        """All areas, in order."""
        readable = self._recorder.judge(CAN_BE_READ, partial(self._read, backend))
        if readable.status is Status.FAIL:
            return Report(self.name, (readable,), identity=self.identity)
        if not self._device_count:
            return self.without_hardware("the plugin lists no device")
        checks: dict[str, Callable[[Backend, Recorder], None]] = {
            "capabilities": check_capabilities,
            "device": check_devices,
            "memory": check_memory,
            "operators": partial(_check_operators, quick=quick),
            "collectives": check_ranks,
        }
        for area in AREAS:
            self._recorder.enter_area(area)
            checks[area](backend, self._recorder)
        if self._recorder.coverage.declared:
            self._recorder.skip_rest_out_of_reach()
        return self._report()

    def without_hardware(self, detail: str) -> Report:
        """Whatever the filter: nobody is to read an empty report as a good one."""
        skips = tuple(Result(area, Status.SKIP_NO_HARDWARE, detail) for area in AREAS)
        return Report(self.name, skips, identity=self.identity)

    def _read(self, backend: Backend) -> str:
        """Without a name, a report and a list of devices no other check means anything."""
        read_info(self.name, backend)
        self.identity.update(identify(backend))
        self._device_count = len(backend.devices.list_devices())
        return f"{self.identity['chip']}, {self._device_count} devices"

    def _report(self) -> Report:
        return Report(self.name, self._recorder.results, self._recorder.coverage, self.identity)

    def _give_up(self, name: str) -> None:
        if self._limits is not None:
            self._recorder.give_up(name, f"not done after {self._limits.seconds:g} s: it hangs")
            self._limits.on_hang(self._report())


def _seconds(limits: Limits | None) -> float | None:
    return None if limits is None else limits.seconds


def _check_operators(backend: Backend, recorder: Recorder, *, quick: bool) -> None:
    if backend.operators is None and not native_operators(backend.capabilities()):
        for operator in CATALOGUE:
            recorder.skip_undeclared(f"operators/{operator}", "the plugin brings a runner of its own")
        return
    # Only here, since it imports the tensor framework: a plugin without operators needs none.
    from plugins.conformance.checks_operators import check_operators  # noqa: PLC0415

    check_operators(backend, recorder, quick=quick)
