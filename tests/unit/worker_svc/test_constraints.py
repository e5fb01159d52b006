"""Slots with a constraint get what it leaves them, others nothing; what cannot be followed fails alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chipmesh.device.v1alpha1.execution_pb2 import (
    AdmittedRequest,
    AllocateKvCacheRequest,
    LoadModelRequest,
    PrefillChunk,
    StepPlan,
)
from chipmesh.device.v1alpha1.sampling_pb2 import SamplingParameters
from meshkit.constraints.form import REGEX, Constraint
from meshkit.errors import InvalidArgument
from plugins.hash.options import HashOptions
from plugins.hash.runner import HashRunner
from plugins.sdk.runner import (
    AllowedTokens,
    DecodeRows,
    LoadedModel,
    PrefillRow,
    SamplingSettings,
    SlotAdmission,
    StepBatch,
    StepOutput,
)
from tests.unit.gateway.tiny_model import IM_END, VOCAB_SIZE, tokens_of, write_tiny_model
from worker_svc.constraints import StepConstraints
from worker_svc.plan_reading import read_admission
from worker_svc.step_engine import StepEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    file: Path = write_tiny_model(tmp_path_factory.mktemp("tiny")) / "tokenizer.json"
    return LoadedModel("a", VOCAB_SIZE, 64, 1, 1, "w", "n", "float32", "l", (IM_END,), str(file))


@pytest.fixture
def constraints(model: LoadedModel) -> StepConstraints:
    made = StepConstraints.of(model, runner_takes_them=True)
    assert made.reason == ""
    return made


def admit(
    constraints: StepConstraints, slot: int, regex: str | None, *, output: str = "", **settings: Any
) -> None:
    constraint = None if regex is None else Constraint(REGEX, regex)
    plain = SamplingSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, {}, False, (), 0, constraint)
    sampling = replace(plain, **settings)
    constraints.admit(SlotAdmission(slot, sampling, len(output), 0, (), tokens_of(output)))


def batch(*decoding: int, prefill: tuple[int, ...] = (), chunk_of: int | None = None) -> StepBatch:
    """Decoding slots, slots with their last chunk, and one with a chunk that is not the last."""
    ids = np.array([1], dtype=np.int32)
    rows = [PrefillRow(slot, 0, ids, ids, samples=True) for slot in prefill]
    if chunk_of is not None:
        rows.insert(0, PrefillRow(chunk_of, 0, ids, ids, samples=False))
    slots = np.array(decoding, dtype=np.int32)
    decode = DecodeRows(slots, slots, slots.reshape(-1, 1)) if decoding else None
    return StepBatch(decode, rows)


def sets_of(allowed: AllowedTokens | None) -> list[set[int] | None]:
    assert allowed is not None
    bits = np.unpackbits(allowed.words.view(np.uint8), axis=1, bitorder="little")
    return [None if row < 0 else set(np.flatnonzero(bits[row]).tolist()) for row in allowed.rows.tolist()]


def output_of(**tokens: int) -> StepOutput:
    """Tokens by s0, s1 and so on."""
    slots = np.array([int(name[1:]) for name in tokens], dtype=np.int32)
    return StepOutput(slots, np.array(list(tokens.values()), dtype=np.int32))


def test_rows_come_in_the_order_in_which_they_sample(constraints: StepConstraints) -> None:
    admit(constraints, 1, "a")
    admit(constraints, 2, None)
    admit(constraints, 5, "b|c")
    admit(constraints, 7, "d")
    step = constraints.apply(batch(1, 2, prefill=(9, 5), chunk_of=7))
    assert sets_of(step.allowed) == [{ord("a")}, None, None, {ord("b"), ord("c")}]


def test_a_step_without_constrained_rows_is_the_same_object_and_costs_nothing(
    constraints: StepConstraints,
) -> None:
    plain = batch(0, 1)
    assert constraints.apply(plain) is plain
    admit(constraints, 3, "a")
    assert constraints.apply(plain) is plain
    assert constraints.take_seconds() is None
    constraints.apply(batch(3))
    assert (constraints.take_seconds() or 0) > 0
    assert constraints.take_seconds() is None


def test_outputs_go_on_by_what_was_sampled_and_a_replay_comes_to_the_same_place(
    constraints: StepConstraints,
) -> None:
    admit(constraints, 0, "abc?")
    for token in tokens_of("ab"):
        constraints.apply(batch(0))
        constraints.follow(output_of(s0=token))
    admit(constraints, 4, "abc?", output="ab")
    step = constraints.apply(batch(0, 4))
    assert sets_of(step.allowed) == [{ord("c"), IM_END}] * 2


def test_min_tokens_holds_while_something_else_may_come(constraints: StepConstraints) -> None:
    settings: dict[str, Any] = {"suppressed_token_ids": (IM_END,), "min_tokens": 2}
    admit(constraints, 0, "a?", **settings)
    assert sets_of(constraints.apply(batch(0)).allowed) == [{ord("a")}]
    constraints.follow(output_of(s0=ord("a")))
    assert sets_of(constraints.apply(batch(0)).allowed) == [{IM_END}]
    admit(constraints, 1, "[ab]*", output="ab", **settings)
    assert sets_of(constraints.apply(batch(1)).allowed) == [{ord("a"), ord("b"), IM_END}]


def test_a_form_that_does_not_compile_or_has_not_been_kept_fails_alone(constraints: StepConstraints) -> None:
    admit(constraints, 0, "(a")
    admit(constraints, 1, "a+")
    admit(constraints, 2, "ab", output="x")
    step = constraints.apply(batch(0, 1, 2))
    assert sets_of(step.allowed) == [None, {ord("a")}, None]
    made = constraints.follow(output_of(s0=3, s1=ord("a"), s2=4))
    assert (made.slots.tolist(), made.token_ids.tolist()) == ([1], [ord("a")])
    assert [(each.slot, each.reason) for each in made.failures] == [
        (0, "CONSTRAINT_FAILED"),
        (2, "CONSTRAINT_FAILED"),
    ]
    assert "unclosed" in made.failures[0].message
    assert "so far" in made.failures[1].message


def test_a_slot_that_is_released_or_reset_is_free_again(constraints: StepConstraints) -> None:
    admit(constraints, 0, "a")
    constraints.release(0)
    admit(constraints, 1, "a")
    constraints.reset()
    assert constraints.apply(batch(0, 1)).allowed is None
    admit(constraints, 2, "a")
    admit(constraints, 2, None)
    assert constraints.apply(batch(2)).allowed is None


def test_where_there_are_none_the_reason_is_told_and_a_request_fails_by_it(model: LoadedModel) -> None:
    without = StepConstraints.of(model, runner_takes_them=False)
    assert "samples by itself" in without.reason
    admit(without, 0, "a")
    assert without.apply(batch(0)).allowed is None
    (failure,) = without.follow(output_of(s0=1)).failures
    assert failure.reason == "CONSTRAINT_UNSUPPORTED"


def test_a_chip_that_samples_by_itself_says_so_and_fails_constrained_requests_alone() -> None:
    engine = StepEngine(HashRunner(HashOptions()))
    loaded = engine.load(LoadModelRequest(), lambda _stage, _share: None)
    assert "samples by itself" in loaded.no_constraints_reason
    engine.allocate(AllocateKvCacheRequest(page_count=8, page_size_tokens=4, max_slots=4))
    assert engine.attach().model.no_constraints_reason == loaded.no_constraints_reason
    plain = SamplingParameters(top_p=1.0, repetition_penalty=1.0)
    bound = SamplingParameters(top_p=1.0, repetition_penalty=1.0)
    bound.constraint.regex = "a"
    plan = StepPlan(
        epoch=1, step_seq=1,
        admitted=[
            AdmittedRequest(slot=0, sampling=bound, page_ids=[0]),
            AdmittedRequest(slot=1, sampling=plain, page_ids=[1]),
        ],
        prefill=[PrefillChunk(slot=slot, token_ids=[1, 2], last=True) for slot in (0, 1)],
    )  # fmt: skip
    result = engine.execute(plan).to_proto()
    assert list(result.slots) == [1]
    assert [(failure.slot, failure.reason) for failure in result.failures] == [(0, "CONSTRAINT_UNSUPPORTED")]
    again = engine.execute(StepPlan(epoch=1, step_seq=2, decode=True)).to_proto()
    assert list(again.slots) == [1]


def test_an_executor_without_llguidance_serves_all_else_and_says_why(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "meshkit.constraints.matching", None)
    without = StepConstraints.of(model, runner_takes_them=True)
    assert "llguidance" in without.reason
    assert without.apply(batch(0)).allowed is None


def test_an_admission_with_a_constraint_and_without_its_whole_output_is_refused() -> None:
    request = AdmittedRequest(
        sampling=SamplingParameters(top_p=1.0, repetition_penalty=1.0), output_count=2, output_token_ids=[1]
    )
    request.sampling.constraint.regex = "a"
    with pytest.raises(InvalidArgument) as refused:
        read_admission(request, vocab_size=9, field="plan.admitted[0]")
    assert refused.value.field == "plan.admitted[0].output_token_ids"
    request.output_token_ids.append(2)
    assert list(read_admission(request, vocab_size=9, field="x").output_token_ids) == [1, 2]
