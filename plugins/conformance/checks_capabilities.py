"""The report: it contradicts neither itself nor what the plugin brings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from plugins.conformance.recorder import Recorder, require
from plugins.conformance.report import Fault
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.capabilities import Coverage
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.registry import check_versions
from plugins.sdk.report_checks import (
    COLLECTIVES,
    find_in_collectives,
    find_in_emulation,
    find_in_operators,
    find_in_precisions,
    find_in_sizes,
    native_operators,
)

__all__ = ["COLLECTIVES", "check_capabilities", "has_operator", "native_operators"]

_REPEATS = 10
_CONTRADICTION = Fault.CONTRADICTION


def check_capabilities(backend: Backend, recorder: Recorder) -> None:
    """Run all checks of identity and report."""
    checks = {
        "capabilities/identity": _identity,
        "capabilities/report_is_frozen": _report_is_frozen,
        "capabilities/precisions": _precisions,
        "capabilities/sizes": _sizes,
        "capabilities/operator_entries": _operator_entries,
        "capabilities/declared_operators_exist": _declared_operators_exist,
        "capabilities/declared_collectives_exist": _declared_collectives_exist,
        "capabilities/something_runs_models": _something_runs_models,
    }
    recorder.run_all({name: partial(check, backend) for name, check in checks.items()})


def _identity(backend: Backend) -> str:
    info = backend.info()
    require(bool(info.name) and bool(info.plugin_version), _CONTRADICTION, "name or plugin_version is empty")
    check_versions(info)
    return f"{info.name} {info.plugin_version}, contract {info.contract_version}"


def _report_is_frozen(backend: Backend) -> str:
    first = backend.capabilities()
    message = first.to_proto().SerializeToString(deterministic=True)
    for _ in range(_REPEATS):
        again = backend.capabilities()
        same = again == first and again.to_proto().SerializeToString(deterministic=True) == message
        require(same, _CONTRADICTION, "the report changed between two calls")
    _require_none(find_in_emulation(first))
    return f"{_REPEATS} calls, {len(message)} bytes"


def _precisions(backend: Backend) -> str:
    report = backend.capabilities()
    _require_none(find_in_precisions(report))
    return f"{', '.join(report.compute_dtypes)}; sums in {report.accumulation_dtype}"


def _sizes(backend: Backend) -> str:
    report = backend.capabilities()
    _require_none(find_in_sizes(report, device_count=len(backend.devices.list_devices())))
    return f"page sizes {list(report.page_sizes_tokens) or 'any'}"


def _operator_entries(backend: Backend) -> str:
    """Names are of the catalogue and come once; dtypes are compute dtypes; a fallback says why."""
    report = backend.capabilities()
    _require_none(find_in_operators(report))
    return f"{len(native_operators(report))} native of {len(report.operators)}"


def _require_none(contradictions: Sequence[str]) -> None:
    require(not contradictions, _CONTRADICTION, "; ".join(contradictions))


def _declared_operators_exist(backend: Backend) -> str:
    declared = native_operators(backend.capabilities())
    missing = [name for name in declared if not has_operator(backend, name)]
    require(
        not missing, Fault.DECLARED_BUT_MISSING, f"declared, but the plugin has none: {', '.join(missing)}"
    )
    return f"{len(declared)} operators"


def has_operator(backend: Backend, name: str) -> bool:
    """Whether the plugin has an implementation of its own of an operator."""
    operators = backend.operators
    if operators is None or name not in CATALOGUE:
        return False
    return operators.coverage(name) is not Coverage.REFERENCE


def _declared_collectives_exist(backend: Backend) -> str:
    report = backend.capabilities()
    declared = report.collectives
    _require_none(find_in_collectives(report))
    present = backend.collectives is not None
    require(
        present or not declared,
        Fault.DECLARED_BUT_MISSING,
        f"declared, but the plugin has none: {', '.join(declared)}",
    )
    return ", ".join(declared) or "none declared, none needed"


def _something_runs_models(backend: Backend) -> str:
    """Operators for the framework's runner, or a runner of its own."""
    own = backend.create_runner(RunnerContext()) is not None
    require(
        own or backend.operators is not None,
        Fault.DECLARED_BUT_MISSING,
        "the plugin brings neither operators nor a runner: nothing can run a model on it",
    )
    return "a runner of its own" if own else "operators for the framework's runner"
