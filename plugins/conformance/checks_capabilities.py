"""The report: it contradicts neither itself nor what the plugin brings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from plugins.conformance.recorder import CheckFailed, Recorder, require
from plugins.conformance.report import Fault
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.catalogue import CATALOGUE, UNIT_ROUNDOFF, holds
from plugins.sdk.registry import check_versions
from plugins.sdk.tensors import DTYPE_BYTES

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
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
    for name, check in checks.items():
        recorder.run(name, partial(check, backend))


def native_operators(report: CapabilityReport) -> list[str]:
    """Operators that the report declares as the plugin's own."""
    return [entry.name for entry in report.operators if entry.coverage is not Coverage.REFERENCE]


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
    require(
        first.emulated == bool(first.emulation_note),
        _CONTRADICTION,
        "emulated without a note, or a note alone",
    )
    return f"{_REPEATS} calls, {len(message)} bytes"


def _precisions(backend: Backend) -> str:
    report = backend.capabilities()
    for field in ("compute_dtypes", "kv_cache_dtypes"):
        dtypes: Sequence[str] = getattr(report, field)
        require(bool(dtypes), _CONTRADICTION, f"{field} is empty")
        require(len(set(dtypes)) == len(dtypes), _CONTRADICTION, f"{field} repeats: {list(dtypes)}")
    unknown = [dtype for dtype in report.compute_dtypes if dtype not in DTYPE_BYTES]
    require(not unknown, _CONTRADICTION, f"compute_dtypes that the contract does not know: {unknown}")
    if native_operators(report):
        known = report.accumulation_dtype in UNIT_ROUNDOFF
        require(known, _CONTRADICTION, f"accumulation_dtype {report.accumulation_dtype!r} is no float dtype")
        require(bool(report.kv_layout), _CONTRADICTION, "kv_layout is empty")
    return f"{', '.join(report.compute_dtypes)}; sums in {report.accumulation_dtype}"


def _sizes(backend: Backend) -> str:
    report = backend.capabilities()
    pages = list(report.page_sizes_tokens)
    require(
        all(size > 0 for size in pages) and len(set(pages)) == len(pages),
        _CONTRADICTION,
        f"page_sizes_tokens: {pages}",
    )
    preferred = (report.preferred_chunk_tokens, report.preferred_batch_size)
    require(min(preferred) >= 0, _CONTRADICTION, f"preferred chunk and batch are {preferred}")
    count = len(backend.devices.list_devices())
    strangers = [link.peer_device for link in report.links if not 0 <= link.peer_device < count]
    require(not strangers, _CONTRADICTION, f"links to devices that are not there: {strangers}")
    return f"page sizes {pages or 'any'}"


def _operator_entries(backend: Backend) -> str:
    """Names are of the catalogue and come once; dtypes are compute dtypes; a fallback says why."""
    report = backend.capabilities()
    twice = [name for name, count in Counter(entry.name for entry in report.operators).items() if count > 1]
    require(not twice, _CONTRADICTION, f"operators that come twice: {twice}")
    for entry in report.operators:
        require(entry.name in CATALOGUE, _CONTRADICTION, f"operator {entry.name!r} is not in the catalogue")
        strange = [dtype for dtype in entry.dtypes if dtype not in report.compute_dtypes]
        if CATALOGUE[entry.name].follows_compute_dtype:
            require(not strange, _CONTRADICTION, f"{entry.name} covers dtypes that the chip lacks: {strange}")
        _check_constraints(entry)
        explained = entry.coverage is not Coverage.REFERENCE or bool(entry.reason)
        require(explained, _CONTRADICTION, f"{entry.name} runs on the reference, and the report says not why")
    return f"{len(native_operators(report))} native of {len(report.operators)}"


def _check_constraints(entry: OperatorCapability) -> None:
    """Each can be read, and together they leave at least one shape class."""
    classes = CATALOGUE[entry.name].shape_classes
    try:
        left = [one for one in classes if all(holds(each, one.sizes) for each in entry.constraints)]
    except ValueError as error:
        raise CheckFailed(_CONTRADICTION, f"{entry.name}: {error}") from error
    require(bool(left), _CONTRADICTION, f"the constraints of {entry.name} leave no shape class to check")


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
    declared = backend.capabilities().collectives
    unknown = [name for name in declared if name not in COLLECTIVES]
    require(not unknown, _CONTRADICTION, f"collectives that the contract does not know: {unknown}")
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
