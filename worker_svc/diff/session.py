"""Runs a model on both sides: one is recorded, the other repeats its calls and then runs on by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder
from plugins.sdk.catalogue import UNIT_ROUNDOFF
from plugins.sdk.operator_table import OperatorBinder
from plugins.sdk.planning import ExecutionPlan
from plugins.sdk.runner import LoadOptions
from plugins.sdk.step_program import PROGRAM_QUANTIZATIONS
from worker_svc.diff.calls import (
    Form,
    OperatorCall,
    RecordingOperators,
    RepeatedCall,
    RepeatingOperators,
    check_all_repeated,
)
from worker_svc.diff.comparison import CallDifference, StageDifference, compare_call
from worker_svc.diff.sides import OpenSide, choose_dtypes, choose_page_size
from worker_svc.diff.steps import Step, count_pages, plan_steps
from worker_svc.diff.tolerances import Precision
from worker_svc.layers.step_tensors import build_step, sampling_rows
from worker_svc.model_building import PlannedModel, allocate_pages, plan_model, require_operators
from worker_svc.models.architecture import Model
from worker_svc.weights import StoredQuantized, WeightSource

HEAD = "head"
"""The stage behind the layers: the final norm and the product that makes logits."""


@dataclass(frozen=True)
class Side:
    """A side and the model as it is planned there."""

    open: OpenSide
    planned: PlannedModel

    @property
    def plan(self) -> ExecutionPlan:
        """How it runs."""
        return self.planned.plan

    @property
    def precision(self) -> Precision:
        """What it computes and sums in."""
        return Precision(self.plan.dtype.value, self.plan.accumulation_dtype.value)

    @property
    def form(self) -> Form:
        """How it wants its tensors."""
        layout = require_operators(self.planned.backend).kv_layout
        return Form(self.planned.dtype, self.planned.device, layout)


@dataclass
class Findings:
    """What a comparison found. calls: in the order of the run. tokens: greedy ones, by each side's logits."""

    left: Side
    right: Side
    page_size: int
    recorded: str
    """The side whose inputs every call was compared on: "left" or "right"."""
    prompt: Sequence[int]
    steps: Sequence[str]
    calls: list[CallDifference] = field(default_factory=list)
    stages: dict[str, StageDifference] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=lambda: {"left": [], "right": []})

    @property
    def first_divergence(self) -> CallDifference | None:
        """The first call out of tolerance."""
        return next((call for call in self.calls if call.diverges), None)

    def first_non_finite(self, side: int) -> CallDifference | None:
        """The first call whose result is not finite on a side, 0: left, 1: right."""
        return next((call for call in self.calls if call.non_finite[side]), None)


@dataclass
class Pair:
    """Both sides, planned alike."""

    left: Side
    right: Side
    page_size: int

    @property
    def folder(self) -> ModelFolder:
        """The model's files."""
        return self.left.planned.folder


def plan_pair(left: OpenSide, right: OpenSide, options: LoadOptions) -> Pair:
    """Plan one model on both back ends, in a dtype and a page size that both have. The built-in side gets the
    weights as the other rounds them: what is compared is arithmetic, not formats.

    Raises:
        InvalidArgument: (quantization) one of step programs, which have no operators to compare.
        MeshError: as choose_dtypes, choose_page_size, plan_model.
    """
    if options.quantization in PROGRAM_QUANTIZATIONS:
        raise InvalidArgument(
            f"quantization is {options.quantization!r}, which step programs alone offer; operators are "
            "compared here: leave it out",
            field="quantization",
        )
    page_size = choose_page_size(left, right)
    dtypes = choose_dtypes(left, right, options.dtype)
    sides = [
        Side(side, plan_model(side.backend, replace(options, dtype=dtype), _unwatched, page_size=page_size))
        for side, dtype in zip((left, right), dtypes, strict=True)
    ]
    rounded = [_rounded_as(side, other) for side, other in (sides, sides[::-1])]
    return Pair(rounded[0], rounded[1], page_size)


def compare_models(pair: Pair, prompt: Sequence[int]) -> Findings:
    """Run the prompt and some decode steps through both.

    Raises:
        FailedPrecondition: the two sides do not make the same calls. MeshError: a side cannot run the model.
    """
    # Values of the shorter dtype are exact in the longer one, never the other way round.
    first_is_left = UNIT_ROUNDOFF[pair.left.precision.dtype] >= UNIT_ROUNDOFF[pair.right.precision.dtype]
    first, second = (pair.left, pair.right) if first_is_left else (pair.right, pair.left)
    steps = plan_steps(prompt, pair.page_size)
    recorded = "left" if first_is_left else "right"
    names = [step.name for step in steps]
    findings = Findings(pair.left, pair.right, pair.page_size, recorded, prompt, names)
    calls: deque[OperatorCall] = deque()
    name = ""

    def compare(repeated: RepeatedCall) -> None:
        precisions = (first.precision, second.precision)
        findings.calls.append(compare_call(repeated, name, precisions, first_is_left=first_is_left))

    recording = RecordingOperators(first.planned.operators, calls)
    repeating = RepeatingOperators(second.planned.operators, second.form, calls, compare)
    pages = count_pages(len(prompt), pair.page_size)
    with _running(first, recording, pages, pair) as one, _running(second, repeating, pages, pair) as other:
        last_token = 0
        for step in steps:
            name = step.name
            stages = one.run(step, last_token)
            others = other.run(step, last_token)
            check_all_repeated(calls)
            last_token = _take_stages(findings, stages, others, first_is_left=first_is_left)
    return findings


class _Running:
    """A built model with its cache."""

    def __init__(self, side: Side, model: Model, layers: Sequence[Tensor], page_size: int) -> None:
        self._side = side
        self._model = model
        self._layers = layers
        self._page_size = page_size

    def run(self, step: Step, last_token: int) -> dict[str, Tensor]:
        """One forward pass: the result of each stage, on the host."""
        return self._side.planned.backend.execute_runnable(partial(self._forward, step, last_token))

    def _forward(self, step: Step, last_token: int) -> dict[str, Tensor]:
        stages: dict[str, Tensor] = {}

        def observe(name: str, values: Tensor) -> None:
            stages[name] = values.detach().to("cpu", copy=True)

        tensors = build_step(
            step.batch,
            np.array([last_token], dtype=np.int64),
            page_size=self._page_size,
            dtype=self._side.planned.dtype,
            device=self._side.planned.device,
        )
        hidden = self._model.forward(tensors, self._layers, observe)
        rows, _ = sampling_rows(step.batch)
        if len(rows):
            observe(HEAD, self._model.logits(hidden[torch.from_numpy(rows).to(hidden.device)]))
        return stages


@contextmanager
def _running(side: Side, operators: OperatorBinder, pages: int, pair: Pair) -> Iterator[_Running]:
    planned = side.planned
    model = planned.build(operators, _unwatched)
    buffer, layers = allocate_pages(
        planned.backend,
        model.kv_shape,
        page_count=pages,
        page_size=pair.page_size,
        dtype=side.plan.kv_cache_dtype.value,
        device=0,
    )
    try:
        yield _Running(side, model, layers, pair.page_size)
    finally:
        planned.backend.memory.free(buffer)


def _take_stages(
    findings: Findings, first: dict[str, Tensor], second: dict[str, Tensor], *, first_is_left: bool
) -> int:
    """Add a step's stages to the findings; the token that goes on: the recorded side's, on both sides."""
    left, right = (first, second) if first_is_left else (second, first)
    for name, values in left.items():
        findings.stages.setdefault(name, StageDifference(name)).add(values, right[name])
    if HEAD not in first:
        return 0
    for side, stages in (("left", left), ("right", right)):
        findings.tokens[side].append(_greedy(stages[HEAD]))
    return _greedy(first[HEAD])


def _greedy(logits: Tensor) -> int:
    """The token of the last row's largest logit that is a number; 0 where none is."""
    return int(logits[-1].float().nan_to_num(nan=-torch.inf, posinf=-torch.inf).argmax())


class _RoundedWeights:
    """A source whose values are rounded to `dtype`, whatever dtype they are asked for in."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def names(self) -> tuple[str, ...]:
        """As the source."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """As the source."""
        return self._source.shape(name)

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rounded, then as asked for."""
        return self._source.read(name, self._dtype).to(dtype)

    def quantized(self, name: str) -> StoredQuantized | None:
        """As the source: codes have no dtype to be rounded to."""
        return self._source.quantized(name)


def _rounded_as(side: Side, other: Side) -> Side:
    if not side.open.is_reference or other.open.is_reference:
        return side
    source = _RoundedWeights(side.planned.source, other.planned.dtype)
    return replace(side, planned=replace(side.planned, source=source))


def _unwatched(stage: str, share: float) -> None:
    del stage, share
