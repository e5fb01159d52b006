"""Third duty: every declared operator, in every dtype and shape class, does what the catalogue says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plugins.conformance.cases import Case, make_case
from plugins.conformance.checks_capabilities import has_operator
from plugins.conformance.comparison import check_tokens, compare_outputs
from plugins.conformance.definitions import define, nearest_cell
from plugins.conformance.host_values import from_host_tensor, raw_bytes, to_host_tensor
from plugins.conformance.recorder import CheckFailed, Recorder, require
from plugins.conformance.report import Fault, Result, Status
from plugins.sdk.backend import Backend
from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.catalogue import CATALOGUE, KV, UNIT_ROUNDOFF, OpSpec, ShapeClass, holds
from plugins.sdk.declined import was_declined_at_start
from plugins.sdk.kv_layout import DIMENSIONS, KvLayout
from plugins.sdk.operators import OperatorSet
from plugins.sdk.tensors import carrier_of

_REPEATS = 3
_GUARD_ELEMENTS = 4096
"""Elements before and after a cache that is written to; a multiple of every alignment that chips ask for."""
_GUARD_VALUE = 7.0
_DEVICE = 0


def check_operators(backend: Backend, recorder: Recorder, *, quick: bool) -> None:
    """Run all declared combinations; with `quick` without the heavy shape classes."""
    report = backend.capabilities()
    entries = {entry.name: entry for entry in report.operators}
    steps: dict[str, Callable[[], object]] = {}
    for name, spec in CATALOGUE.items():
        entry = entries.get(name)
        if entry is None or entry.coverage is Coverage.REFERENCE:
            steps[f"operators/{name}"] = partial(_skip_or_fail, recorder, name, entry)
            continue
        for dtype, shape_class in _combinations(spec, entry, report):
            label = f"operators/{name}/{dtype}/{shape_class.name}"
            if excluded := _why_excluded(spec, entry, report, shape_class):
                steps[label] = partial(recorder.skip_undeclared, label, excluded)
                continue
            combination = (name, dtype, shape_class.name)
            recorder.declare(combination)
            if not (quick and shape_class.heavy):
                kv_dtype = dtype if dtype in report.kv_cache_dtypes else report.kv_cache_dtypes[0]
                check = partial(_check, backend, report, spec, dtype, kv_dtype, shape_class)
                steps[label] = partial(recorder.run_combination, label, combination, check)
        for dtype, kv_dtype, shape_class in _converting(spec, entry, report):
            label = f"operators/{name}/{dtype}/{shape_class.name}/{kv_dtype}"
            check = partial(_check, backend, report, spec, dtype, kv_dtype, shape_class)
            steps[label] = partial(recorder.run, label, check)
    recorder.expect(steps)
    for step in steps.values():
        step()


def _skip_or_fail(recorder: Recorder, name: str, entry: OperatorCapability | None) -> None:
    """What runs on the reference is no fault, unless it does since the plugin's own went wrong."""
    reason = "the report does not list it" if entry is None else entry.reason
    if was_declined_at_start(reason):
        label = f"operators/{name}/declined_at_start"
        recorder.add(Result(label, Status.FAIL, reason, Fault.DECLINED_AT_START))
    else:
        recorder.skip_undeclared(f"operators/{name}", reason)


def _combinations(
    spec: OpSpec, entry: OperatorCapability, report: CapabilityReport
) -> Iterator[tuple[str, ShapeClass]]:
    """Dtypes that the catalogue, the chip and the operator's entry have in common, times shape classes."""
    for dtype in spec.dtypes:
        if spec.follows_compute_dtype and dtype not in report.compute_dtypes:
            continue
        if entry.dtypes and dtype not in entry.dtypes:
            continue
        for shape_class in spec.shape_classes:
            yield dtype, shape_class


def _converting(
    spec: OpSpec, entry: OperatorCapability, report: CapabilityReport
) -> Iterator[tuple[str, str, ShapeClass]]:
    """(dtype, cache's dtype, shape class) for caches in what the chip does not compute in: one dtype, no
    heavy class.
    """
    if not any(tensor.dtype == KV for tensor in spec.inputs):
        return
    for dtype, shape_class in _combinations(spec, entry, report):
        if dtype != report.compute_dtypes[0] or shape_class.heavy:
            continue
        if not _why_excluded(spec, entry, report, shape_class):
            for kv_dtype in report.kv_cache_dtypes:
                if kv_dtype not in report.compute_dtypes:
                    yield dtype, kv_dtype, shape_class


def _why_excluded(
    spec: OpSpec, entry: OperatorCapability, report: CapabilityReport, shape_class: ShapeClass
) -> str:
    """The constraint or the page sizes that leave a shape class out; "" where it is declared. A constraint
    that cannot be read leaves nothing out: capabilities/operator_entries reports it.
    """
    for constraint in entry.constraints:
        try:
            if not holds(constraint, shape_class.sizes):
                return f"the report constrains {spec.name}: {constraint}"
        except ValueError:
            continue
    pages, page = report.page_sizes_tokens, shape_class.sizes.get("S")
    if pages and page is not None and page not in pages:
        return f"the report has page sizes {', '.join(map(str, pages))}, not {page}"
    return ""


def _check(
    backend: Backend,
    report: CapabilityReport,
    spec: OpSpec,
    dtype: str,
    kv_dtype: str,
    shape_class: ShapeClass,
) -> str:
    operators = backend.operators
    if operators is None or not has_operator(backend, spec.name):
        raise CheckFailed(
            Fault.DECLARED_BUT_MISSING,
            f"{spec.name} is declared {_coverage(report, spec.name)}, but the plugin has no implementation "
            "of it: it would run on the reference",
        )
    accumulation = report.accumulation_dtype
    require(
        accumulation in UNIT_ROUNDOFF,
        Fault.CONTRADICTION,
        f"accumulation_dtype is {accumulation!r}; a tolerance needs one of {', '.join(UNIT_ROUNDOFF)}",
    )
    case = make_case(spec, shape_class, dtype=dtype, kv_dtype=kv_dtype)
    work = partial(_run_case, backend, operators, case, accumulation)
    return backend.execute_runnable(work)


def _coverage(report: CapabilityReport, name: str) -> str:
    return next(entry.coverage.value for entry in report.operators if entry.name == name)


def _run_case(backend: Backend, operators: OperatorSet, case: Case, accumulation: str) -> str:
    placed = _place(backend, case, operators.kv_layout)
    first = _call(backend, operators, case, placed)
    _check_inputs_kept(backend, case, placed)
    _check_guards(backend, placed)
    expected = None if case.spec.name == "sample" else define(case.spec.name, case.inputs, case.attributes)
    worst = 0.0
    if expected is None:
        check_tokens(first[0], case.inputs)
    elif case.spec.writes:
        _check_written(first[0], expected[0].value, case)
    else:
        worst = compare_outputs(first, expected, case, accumulation=accumulation)
    for repeat in range(1, _REPEATS):
        again = _call(backend, operators, case, placed)
        same = all(_same_bits(one, other) for one, other in zip(first, again, strict=True))
        require(
            same,
            Fault.NON_DETERMINISTIC,
            f"call {repeat + 1} on the same inputs gave other bits than the first one",
        )
    return f"largest error {worst:.3f} of the tolerance, {_REPEATS} equal calls"


@dataclass(frozen=True)
class _Placed:
    """A case's inputs on the device. `guarded`: memory around an input that is written to, by its name."""

    inputs: dict[str, Tensor]
    guarded: dict[str, Tensor]


def _place(backend: Backend, case: Case, layout: KvLayout) -> _Placed:
    """Upload all inputs, caches in the chip's layout; what the operator writes lies between guards, in one
    piece of memory.
    """
    inputs: dict[str, Tensor] = {}
    guarded: dict[str, Tensor] = {}
    for spec in case.spec.inputs:
        value = case.inputs.get(spec.name)
        if value is None:
            continue
        in_memory = value
        if spec.dtype == KV:
            in_memory = value.permute([DIMENSIONS.index(name) for name in layout.order]).contiguous()
        if spec.name in case.spec.writes:
            guard = torch.full((_GUARD_ELEMENTS,), _GUARD_VALUE, dtype=value.dtype)
            whole = _upload(backend, torch.cat((guard, in_memory.flatten(), guard)))
            guarded[spec.name] = whole
            placed = whole[_GUARD_ELEMENTS:-_GUARD_ELEMENTS].view(in_memory.shape)
        else:
            placed = _upload(backend, in_memory)
        inputs[spec.name] = layout.as_cache(placed) if spec.dtype == KV else placed
    return _Placed(inputs, guarded)


def _upload(backend: Backend, value: Tensor) -> Tensor:
    """A tensor on the device; of a dtype that caches alone have as its bytes, looked at as that dtype."""
    tensor: Tensor = backend.memory.upload(to_host_tensor(_carried(value)), _DEVICE)
    return tensor.view(value.dtype)


def _download(backend: Backend, tensor: Tensor) -> Tensor:
    held = from_host_tensor(backend.memory.download(_carried(tensor)))
    return held.view(tensor.dtype)


def _carried(value: Tensor) -> Tensor:
    return value.view(getattr(torch, carrier_of(str(value.dtype).removeprefix("torch."))))


def _call(backend: Backend, operators: OperatorSet, case: Case, placed: _Placed) -> tuple[Tensor, ...]:
    """Outputs on the host."""
    outputs = operators.run(case.spec.name, placed.inputs, case.attributes)
    backend.synchronize()
    return tuple(_download(backend, output) for output in outputs)


def _check_inputs_kept(backend: Backend, case: Case, placed: _Placed) -> None:
    changed = [
        name
        for name, value in case.inputs.items()
        if name not in case.spec.writes and not _same_bits(_download(backend, placed.inputs[name]), value)
    ]
    require(
        not changed,
        Fault.INPUT_OVERWRITTEN,
        f"the operator changed {', '.join(changed)}; of its inputs it may write "
        f"{', '.join(case.spec.writes) or 'none'}",
    )


def _check_guards(backend: Backend, placed: _Placed) -> None:
    for name, whole in placed.guarded.items():
        held = _download(backend, whole).double()
        for side, guard in (("before", held[:_GUARD_ELEMENTS]), ("behind", held[-_GUARD_ELEMENTS:])):
            touched = torch.nonzero(guard != _GUARD_VALUE)
            require(
                not len(touched),
                Fault.OUT_OF_BOUNDS_WRITE,
                f"{len(touched)} elements {side} {name} were written",
            )


def _check_written(cache: Tensor, wanted: Tensor, case: Case) -> None:
    """The cells named hold the tokens, and every other cell of the cache is as it was."""
    wanted = nearest_cell(wanted, cache.dtype).double()  # a cache may have a shorter dtype than the keys
    cells = case.inputs["cells"]
    named = torch.zeros(wanted.shape[1] * wanted.shape[2], dtype=torch.bool)
    named[cells] = True
    wrong = (cache.double() != wanted).flatten(1, 2).flatten(2).any(dim=2).any(dim=0)
    beside = torch.nonzero(wrong & ~named).flatten().tolist()
    require(
        not beside,
        Fault.OUT_OF_BOUNDS_WRITE,
        f"cells {beside[:8]} were written; the call names {sorted(cells.tolist())[:8]} and so on",
    )
    missed = torch.nonzero(wrong).flatten().tolist()
    require(not missed, Fault.WRONG_RESULT, f"cells {missed[:8]} do not hold the tokens' keys and values")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and raw_bytes(one) == raw_bytes(other)
