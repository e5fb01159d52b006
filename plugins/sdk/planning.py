"""The execution plan: what a model runs by on a chip, decided once from the capability report. No torch.

Pure: report, call sites and wishes in; decisions with their reasons, or one refusal, out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from meshkit.errors import FailedPrecondition, InvalidArgument
from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.catalogue import CATALOGUE, OpSpec, evaluate, holds, symbols_of
from plugins.sdk.runner import OperatorDecision
from plugins.sdk.step_program import PROGRAM_QUANTIZATIONS, DecoderShape, StepProgramCapability

DEFAULT_PAGE_SIZE = 16
DEFAULT_MAX_RUNNING = 64
_SAMPLERS = ("argmax", "sample")
"""Beside a step program they choose tokens where penalties, bias or log-probabilities want a row's logits."""
_KV_OPERATORS = ("write_kv", "attention_prefill", "attention_decode")
_KV_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Short names that users of `--kv-cache-dtype` know."""
RUNS_ON_CHIP = ("native", "fused", "padded")
"""Choices by an implementation of the plugin's own."""
_BY_OPERATORS = ": by operators"
FALLBACKS = ("padded", "decomposed", "reference")
"""Choices that are not the operator as the catalogue has it: in the log and in a metric."""


@dataclass(frozen=True)
class CallSite:
    """A place of a model that calls an operator. sizes: its fixed symbols, in numbers."""

    operator: str
    where: str
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Choice:
    """One decision and why."""

    value: Any
    reason: str


@dataclass(frozen=True)
class PlanRequest:
    """What was asked for; "auto" and None: whatever suits the chip. Sizes in tokens and requests."""

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    page_size: int | None = None
    chunk_tokens: int | None = None
    max_running_requests: int | None = None
    quantization: str = ""
    strict: bool = False
    ranks: int = 1
    """Over which the model is split: the sites are then those of one."""
    stored_as: str = ""
    """The format of a checkpoint that is quantised already; `quantization` is then its kind."""


@dataclass(frozen=True)
class ExecutionPlan:
    """How a model runs on a chip."""

    chip: str
    emulated: bool
    dtype: Choice
    accumulation_dtype: Choice
    kv_cache_dtype: Choice
    kv_layout: Choice
    page_size: Choice
    chunk_tokens: Choice
    max_running_requests: Choice
    quantization: Choice
    graph_capture: Choice
    step_program: Choice
    """The pattern that runs as one program of the plugin's; None: by operators."""
    operators: Sequence[OperatorDecision] = field(default=())

    def served_by(self) -> list[OperatorDecision]:
        """What serves the model: all operators, or the program and what chooses tokens beside it."""
        if self.step_program.value is None:
            return list(self.operators)
        program = OperatorDecision(
            f"{self.step_program.value}_step", "fused", self.step_program.reason, where="model"
        )
        return [program, *(each for each in self.operators if each.name in _SAMPLERS)]

    def to_json(self) -> dict[str, Any]:
        """For `chipmesh plan --json`."""
        settings = {name: asdict(value) for name, value in vars(self).items() if isinstance(value, Choice)}
        operators = [decision_to_json(each) for each in self.served_by()]
        return {"chip": self.chip, "emulated": self.emulated, **settings, "operators": operators}


def decision_to_json(decision: OperatorDecision) -> dict[str, Any]:
    """One line of the plan; its parts as lines of their own within."""
    line = {
        "operator": decision.name,
        "where": decision.where,
        "calls": decision.calls,
        "sizes": dict(decision.sizes),
        "choice": decision.choice,
        "reason": decision.reason,
    }
    if decision.padded:
        line["padded"] = dict(decision.padded)
    if decision.parts:
        line["parts"] = [decision_to_json(part) for part in decision.parts]
    return line


def plan_execution(
    report: CapabilityReport,
    sites: Sequence[CallSite],
    request: PlanRequest,
    *,
    shape: DecoderShape | None = None,
) -> ExecutionPlan:
    """Decide everything that the report decides. shape: the model's, where it is of a pattern that programs
    know.

    Raises:
        InvalidArgument: a dtype or page size that the chip does not offer; the field is named.
        FailedPrecondition: (model_path) a constraint that cannot be met; (strict) an operator would run on
            the reference; (kv_cache_dtype) nothing converts to it; (quantization) only a step program offers
            it, and none serves the model.
    """
    dtype = choose_dtype(request.dtype, report)
    kv_dtype = choose_kv_dtype(request.kv_cache_dtype, dtype.value, report)
    page_size = choose_page_size(request.page_size, report.page_sizes_tokens)
    program = choose_step_program(
        report,
        shape,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        quantization=request.quantization,
        ranks=request.ranks,
    )
    if request.quantization in PROGRAM_QUANTIZATIONS and program.value is None:
        raise _no_program(request.quantization, program.reason)
    return ExecutionPlan(
        chip=report.chip,
        emulated=report.emulated,
        dtype=dtype,
        accumulation_dtype=Choice(report.accumulation_dtype, "as the chip reports"),
        kv_cache_dtype=kv_dtype,
        kv_layout=_kv_layout(report, program),
        page_size=page_size,
        chunk_tokens=choose_chunk(request.chunk_tokens, report.preferred_chunk_tokens),
        max_running_requests=choose_window(request.max_running_requests, report.preferred_batch_size),
        quantization=_quantization(request, report),
        graph_capture=_graph_capture(report),
        step_program=program,
        operators=plan_operators(
            report.operators, sites, dtype=dtype.value, page_size=page_size.value, strict=request.strict
        ),
    )


def plan_operators(
    capabilities: Sequence[OperatorCapability],
    sites: Sequence[CallSite],
    *,
    dtype: str,
    page_size: int | None = None,
    strict: bool = False,
) -> list[OperatorDecision]:
    """One decision for each operator and set of sizes, in the order of the sites. page_size None: not known
    yet, so what a chip says of it is not looked at.

    Raises:
        FailedPrecondition: as `plan_execution`.
    """
    covered = {each.name: each for each in capabilities}
    groups: dict[tuple[str, frozenset[tuple[str, int]]], list[CallSite]] = {}
    for site in sites:
        groups.setdefault((site.operator, frozenset(site.sizes.items())), []).append(site)
    decisions = [_decide(group, covered, dtype, page_size) for group in groups.values()]
    if strict:
        _refuse_references(decisions)
    return decisions


def part_sites(spec: OpSpec, sizes: Mapping[str, int], where: str) -> list[CallSite]:
    """Where the parts of a fused operator are called, in the order of `spec.parts`."""
    return [
        CallSite(part.operator, where, {symbol: evaluate(text, sizes) for symbol, text in part.sizes.items()})
        for part in spec.parts
    ]


def choose_dtype(requested: str, report: CapabilityReport) -> Choice:
    """The compute dtype. Raises InvalidArgument (dtype)."""
    if requested in ("", "auto"):
        return Choice(report.compute_dtypes[0], "the chip's first choice")
    if requested not in report.compute_dtypes:
        raise InvalidArgument(
            f"dtype is {requested!r}; this chip supports auto, {', '.join(report.compute_dtypes)}",
            field="dtype",
            reason="DTYPE_UNSUPPORTED",
        )
    return Choice(requested, "as asked")


def choose_kv_dtype(requested: str, dtype: str, report: CapabilityReport) -> Choice:
    """The dtype of the KV cache.

    Raises:
        InvalidArgument: (kv_cache_dtype) the report has none of that name.
        FailedPrecondition: (kv_cache_dtype) the report has it, and no operator that converts to it.
    """
    if requested in ("", "auto"):
        if dtype in report.kv_cache_dtypes:
            return Choice(dtype, "the compute dtype")
        chosen = Choice(
            report.kv_cache_dtypes[0], "the chip's first choice: it keeps no cache in the compute dtype"
        )
    else:
        chosen = Choice(_KV_NAMES.get(requested, requested), "as asked")
    if chosen.value not in report.kv_cache_dtypes:
        raise InvalidArgument(
            f"kv_cache_dtype is {requested!r}; this chip has no operator that converts to it. It supports "
            f"auto, {', '.join(report.kv_cache_dtypes)}",
            field="kv_cache_dtype",
            reason="DTYPE_UNSUPPORTED",
        )
    if chosen.value not in report.compute_dtypes:
        _require_conversion(chosen.value, report)
    return chosen


def choose_page_size(requested: int | None, allowed: Sequence[int]) -> Choice:
    """Tokens of a page: as asked, else the report's preferred size, else 16.

    Raises:
        InvalidArgument: (page_size) the report excludes the size asked for.
    """
    if requested is None:
        if allowed:
            return Choice(allowed[0], "the chip's first choice")
        return Choice(DEFAULT_PAGE_SIZE, "the default; the chip takes any size")
    if allowed and requested not in allowed:
        sizes = ", ".join(str(size) for size in allowed)
        raise InvalidArgument(
            f"page_size is {requested}; this chip's attention takes {sizes}. Leave page_size out "
            f"to get {allowed[0]}",
            field="page_size",
        )
    return Choice(requested, "as asked")


def choose_chunk(requested: int | None, preferred: int) -> Choice:
    """Tokens of a prefill chunk, as a ceiling; None: the scheduler's own."""
    if requested is not None:
        return Choice(requested, "as asked")
    if preferred:
        return Choice(preferred, "the chip's preference")
    return Choice(None, "the scheduler's setting; the chip has no preference")


def choose_window(requested: int | None, preferred: int) -> Choice:
    """Most running requests, before the KV cache's size limits it."""
    if requested is not None:
        return Choice(requested, "as asked")
    if preferred:
        return Choice(preferred, "the chip's preference")
    return Choice(DEFAULT_MAX_RUNNING, "the default; the chip has no preference")


def choose_step_program(
    report: CapabilityReport,
    shape: DecoderShape | None,
    *,
    dtype: str,
    kv_dtype: str,
    quantization: str,
    ranks: int = 1,
) -> Choice:
    """The pattern whose program serves the model, else None and what stands in the way. ranks: over which
    the model is split.
    """
    if not report.step_programs:
        return Choice(None, f"the chip has no step programs{_BY_OPERATORS}")
    if ranks > 1:
        return Choice(
            None, f"step programs run whole models, and this is one of {ranks} ranks{_BY_OPERATORS}"
        )
    if shape is None:
        return Choice(None, f"the model is of no pattern that step programs know{_BY_OPERATORS}")
    entry = next((each for each in report.step_programs if each.pattern == shape.pattern), None)
    if entry is None:
        return Choice(None, f"the chip has no program for models of pattern {shape.pattern}{_BY_OPERATORS}")
    obstacle = _program_obstacle(entry, shape, dtype, kv_dtype, quantization)
    if obstacle:
        return Choice(None, f"{obstacle}{_BY_OPERATORS}")
    offered = ", ".join(filter(None, entry.quantizations)) or "none"
    return Choice(
        shape.pattern,
        f"the whole step is one call of the plugin's ({entry.implementation}; quantizations: {offered})",
    )


def _program_obstacle(
    entry: StepProgramCapability, shape: DecoderShape, dtype: str, kv_dtype: str, quantization: str
) -> str:
    if entry.reason:
        return entry.reason
    if dtype not in entry.dtypes:
        return f"the program computes in {', '.join(entry.dtypes)}, not {dtype}"
    if kv_dtype not in entry.kv_cache_dtypes:
        return f"the program caches in {', '.join(entry.kv_cache_dtypes)}, not {kv_dtype}"
    if quantization not in entry.quantizations:
        return f"the program has no {quantization} products"
    symbols = shape.symbols()
    for constraint in entry.constraints:
        if not holds(constraint, symbols):
            seen = _in_words({each: symbols[each] for each in sorted(symbols_of(constraint))})
            return f"the program takes {constraint} only, and here {seen}"
    return ""


def _no_program(quantization: str, reason: str) -> FailedPrecondition:
    cause = reason.removesuffix(_BY_OPERATORS)
    return FailedPrecondition(
        f"quantization is {quantization!r}, which step programs alone offer, and none serves this model "
        f"here: {cause}; leave quantization out to run without, or mend that",
        field="quantization",
        reason="QUANTIZATION_UNSUPPORTED",
    )


def _quantization(request: PlanRequest, report: CapabilityReport) -> Choice:
    asked = request.quantization
    cause = f"as the checkpoint is stored ({request.stored_as})" if request.stored_as else "as asked"
    if not asked:
        return Choice("", "not asked for")
    if asked in PROGRAM_QUANTIZATIONS:
        return Choice(asked, "as asked; the step program's products take such rows")
    covered = {each.name for each in report.operators if each.coverage is Coverage.NATIVE}
    if f"linear_{asked}" in covered:
        return Choice(asked, f"{cause}; the chip has products over such weights")
    return Choice(
        asked, f"{cause}; the chip has no products over such weights: the reference saves memory only"
    )


def _kv_layout(report: CapabilityReport, program: Choice) -> Choice:
    for entry in report.step_programs:
        if entry.pattern == program.value:
            return Choice(entry.kv_layout, "the order that the program's attention reads")
    return Choice(report.kv_layout, "the order that the chip's attention reads")


def _graph_capture(report: CapabilityReport) -> Choice:
    if not report.graph_capture:
        return Choice(False, "the chip reports that its decode steps cannot be captured")
    return Choice(False, "the chip can; the framework's runner launches each operator by itself")


def _require_conversion(kv_dtype: str, report: CapabilityReport) -> None:
    covered = {each.name: each for each in report.operators}
    missing = [
        name for name in _KV_OPERATORS if name not in covered or covered[name].coverage is Coverage.REFERENCE
    ]
    if missing:
        raise FailedPrecondition(
            f"kv_cache_dtype {kv_dtype} needs operators of the chip's own that convert; this one has none "
            f"for {', '.join(missing)}; choose one of {', '.join(report.compute_dtypes)}",
            field="kv_cache_dtype",
            reason="KV_CONVERSION_MISSING",
        )


@dataclass(frozen=True)
class _Obstacle:
    """Why an operator does not run natively. constraint: the one that does not hold, "" for other reasons."""

    reason: str
    constraint: str = ""


def _decide(
    group: Sequence[CallSite], covered: Mapping[str, OperatorCapability], dtype: str, page_size: int | None
) -> OperatorDecision:
    site = group[0]
    spec = CATALOGUE[site.operator]
    entry = covered.get(site.operator)
    sizes = (
        dict(site.sizes)
        if page_size is None or "S" not in spec.fixed_symbols
        else {**site.sizes, "S": page_size}
    )

    def decided(choice: str, reason: str, **more: Any) -> OperatorDecision:
        return OperatorDecision(
            site.operator, choice, reason, where=_summarise(group), calls=len(group), sizes=sizes, **more
        )

    obstacle = _find_obstacle(spec, entry, dtype, sizes)
    if obstacle is None:
        return decided("fused" if spec.fused_from else "native", "covered by the plugin")
    if entry is not None and obstacle.constraint:
        if padded := _find_padding(spec, entry, dtype, sizes):
            return decided("padded", f"{obstacle.reason}; padded to {_in_words(padded)}", padded=padded)
        if symbols_of(obstacle.constraint) & set(spec.structural):
            raise FailedPrecondition(
                f"the model's {site.operator} ({_in_words(sizes)}) does not run on this chip: "
                f"{obstacle.reason}. Choose another model or another chip",
                field="model_path",
                reason="CONSTRAINT_UNMET",
                operator=site.operator,
                constraint=obstacle.constraint,
            )
    parts = [_decide([part], covered, dtype, page_size) for part in part_sites(spec, sizes, site.where)]
    if any(part.choice != "reference" for part in parts):
        names = ", ".join(f"{part.name} {part.choice}" for part in parts)
        return decided("decomposed", f"{obstacle.reason}; by its parts: {names}", parts=parts)
    return decided("reference", obstacle.reason)


def _find_obstacle(
    spec: OpSpec, entry: OperatorCapability | None, dtype: str, sizes: Mapping[str, int]
) -> _Obstacle | None:
    if entry is None:
        return _Obstacle("the plugin does not cover it")
    if entry.coverage is Coverage.REFERENCE:
        return _Obstacle(entry.reason or "the plugin does not cover it")
    if entry.coverage is Coverage.FUSED:
        return _Obstacle(entry.reason or "the plugin covers it within a fused operator only")
    if entry.dtypes and spec.follows_compute_dtype and dtype not in entry.dtypes:
        return _Obstacle(f"the plugin covers {', '.join(entry.dtypes)}, not {dtype}")
    for constraint in entry.constraints:
        named = symbols_of(constraint)
        if named <= sizes.keys() and not holds(constraint, sizes):
            seen = _in_words({symbol: sizes[symbol] for symbol in sorted(named)})
            return _Obstacle(f"it takes {constraint} only, and here {seen}", constraint)
    return None


def _find_padding(
    spec: OpSpec, entry: OperatorCapability, dtype: str, sizes: Mapping[str, int]
) -> dict[str, int] | None:
    """The least growth of one symbol, to twice at most, under which the operator is native."""
    for symbol in spec.padded:
        for size in range(sizes[symbol] + 1, 2 * sizes[symbol] + 1):
            if _find_obstacle(spec, entry, dtype, {**sizes, symbol: size}) is None:
                return {symbol: size}
    return None


def _refuse_references(decisions: Sequence[OperatorDecision]) -> None:
    lines = [line for each in decisions for line in (each.parts or [each])]
    refused = dict.fromkeys(
        f"{line.name} ({line.reason})" for line in lines if line.choice not in RUNS_ON_CHIP
    )
    if refused:
        raise FailedPrecondition(
            f"strict is set and operators would run on the reference: {', '.join(refused)}; "
            "unset strict or choose another dtype",
            field="strict",
            reason="OPERATOR_NOT_NATIVE",
        )


def _summarise(group: Sequence[CallSite]) -> str:
    """Places of equal sizes with their layer numbers left out."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", site.where) for site in group))


def _in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{symbol} is {size}" for symbol, size in sizes.items())
