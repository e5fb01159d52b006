"""The whole run: loads a back end by name and checks its duties, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from meshkit.errors import MeshError
from plugins.conformance.checks_capabilities import check_capabilities, native_operators
from plugins.conformance.checks_collectives import check_collectives
from plugins.conformance.checks_device import check_devices
from plugins.conformance.checks_memory import check_memory
from plugins.conformance.recorder import Recorder, judge
from plugins.conformance.report import Coverage, Report, Result, Status
from plugins.sdk.backend import Backend
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.registry import load_backend

AREAS = ("capabilities", "device", "memory", "operators", "collectives")
NO_HARDWARE = ("NO_DEVICE", "RUNTIME_ABSENT")
"""Reasons of the MeshError with which a factory says that the chip, or its runtime, is not here."""


def run_conformance(
    name: str, options: Mapping[str, str] | None = None, *, only: str = "", quick: bool = False
) -> Report:
    """Check one back end.

    only: run checks whose name contains it. quick: leave heavy shape classes out; the coverage shows it.

    Raises:
        UnknownBackend: no back end has that name.
        MeshError: the back end does not start. A factory that raises with a reason of NO_HARDWARE makes a
            report of skips instead.
    """
    recorder = Recorder(only)
    try:
        backend = load_backend(name, options or {})
    except MeshError as error:
        if error.reason not in NO_HARDWARE:
            raise
        return _without_hardware(name, error.message)
    readable = judge("capabilities/can_be_read", partial(_read, backend))
    if readable.status is Status.FAIL:
        return Report(name, (readable,))
    if not backend.devices.list_devices():
        return _without_hardware(name, "the plugin lists no device", identity=identify(backend))
    check_capabilities(backend, recorder)
    check_devices(backend, recorder)
    check_memory(backend, recorder)
    coverage = _check_operators(backend, recorder, quick=quick)
    check_collectives(backend, recorder, name=name, options=options or {})
    return Report(name, recorder.results, coverage, identify(backend))


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


def _read(backend: Backend) -> str:
    """Without a report and a list of devices no other check means anything."""
    report, devices = backend.capabilities(), backend.devices.list_devices()
    return f"{report.chip}, {len(devices)} devices"


def _check_operators(backend: Backend, recorder: Recorder, *, quick: bool) -> Coverage:
    if backend.operators is None and not native_operators(backend.capabilities()):
        for operator in CATALOGUE:
            recorder.skip_undeclared(f"operators/{operator}", "the plugin brings a runner of its own")
        return Coverage()
    # Only here, since it imports the tensor framework: a plugin without operators needs none.
    from plugins.conformance.checks_operators import check_operators  # noqa: PLC0415

    return check_operators(backend, recorder, quick=quick)


def _without_hardware(name: str, detail: str, *, identity: Mapping[str, Any] | None = None) -> Report:
    """Whatever the filter: nobody is to read an empty report as a good one."""
    skips = tuple(Result(area, Status.SKIP_NO_HARDWARE, detail) for area in AREAS)
    return Report(name, skips, identity=identity or {})
