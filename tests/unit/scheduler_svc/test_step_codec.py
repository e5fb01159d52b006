"""Plans and results between the core and the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from chipmesh.device.v1alpha1 import execution_pb2, sampling_pb2
from scheduler_svc.core.structures import (
    Admission,
    PageAppend,
    PrefillChunk,
    Request,
    RequestId,
    Slot,
    SlotFailure,
    StepPlan,
)
from scheduler_svc.step_codec import MalformedResult, decode_result, encode_plans, needs_history


@dataclass
class Payload:
    sampling: sampling_pb2.SamplingParameters = field(
        default_factory=lambda: sampling_pb2.SamplingParameters(seed=7, top_p=0.5)
    )
    traceparent: str = "00-trace"


def request(*, history: bool) -> Request:
    return Request(
        id=RequestId(1), model="m", prompt=[1, 2, 3], max_output_tokens=9, output=[4, 5],
        needs_history=history, payload=Payload(),
    )  # fmt: skip


def admission(*, history: bool) -> Admission:
    return Admission(Slot(3), request(history=history), 1, 2, (8, 9))


def test_every_part_of_a_plan_reaches_the_wire() -> None:
    plan = StepPlan(
        step_seq=5,
        released_slots=(Slot(1), Slot(2)),
        admitted=(admission(history=False),),
        pages=(PageAppend(Slot(4), (6,)),),
        prefill=(PrefillChunk(Slot(3), 2, [3, 4], True),),
        decode=True,
    )
    encoded = execution_pb2.ExecuteStepsRequest.FromString(
        encode_plans([plan], epoch=11).SerializeToString()
    ).plans[0]
    assert encoded == execution_pb2.StepPlan(
        epoch=11,
        step_seq=5,
        released_slots=[1, 2],
        admitted=[
            execution_pb2.AdmittedRequest(
                slot=3, sampling=Payload().sampling, output_count=1, cached_tokens=2, page_ids=[8, 9],
                traceparent="00-trace",
            )
        ],
        pages=[execution_pb2.PageDelta(slot=4, page_ids=[6])],
        prefill=[execution_pb2.PrefillChunk(slot=3, start=2, token_ids=[3, 4], last=True)],
        decode=True,
    )  # fmt: skip


def test_history_ends_where_the_admission_counts_the_output() -> None:
    plan = StepPlan(step_seq=1, admitted=(admission(history=True),))
    (admitted,) = encode_plans([plan], epoch=1).plans[0].admitted
    assert list(admitted.penalty_prompt_token_ids) == [1, 2, 3]
    assert list(admitted.output_token_ids) == [4]


def test_a_constraint_needs_the_output_and_not_the_prompt() -> None:
    constrained = admission(history=True)
    constrained.request.payload.sampling = sampling_pb2.SamplingParameters(
        repetition_penalty=1.0, constraint=sampling_pb2.Constraint(regex="a*")
    )
    assert needs_history(constrained.request.payload.sampling)
    (admitted,) = encode_plans([StepPlan(step_seq=1, admitted=(constrained,))], epoch=1).plans[0].admitted
    assert list(admitted.penalty_prompt_token_ids) == []
    assert list(admitted.output_token_ids) == [4]
    assert admitted.sampling.constraint.regex == "a*"


def test_a_decode_step_over_an_unchanged_batch_is_a_few_bytes() -> None:
    assert encode_plans([StepPlan(step_seq=1000, decode=True)], epoch=2).ByteSize() < 16


def test_a_result_becomes_plain_lists() -> None:
    result = execution_pb2.StepResult(step_seq=4, slots=[0, 2], token_ids=[10, 11], logprobs=[-0.5, -1.0])
    result.failures.add(slot=1, reason="NON_FINITE_LOGITS", message="why")
    decoded = decode_result(result)
    assert (decoded.step_seq, decoded.slots, decoded.token_ids) == (4, [0, 2], [10, 11])
    assert decoded.logprobs == [-0.5, -1.0]
    assert decoded.failures == (SlotFailure(Slot(1), "NON_FINITE_LOGITS", "why"),)


@pytest.mark.parametrize(
    ("slots", "tokens", "logprobs"), [([1], [], []), ([1], [2, 3], []), ([1, 2], [3, 4], [0.5])]
)
def test_a_result_whose_parts_differ_in_number_is_refused(
    slots: list[int], tokens: list[int], logprobs: list[float]
) -> None:
    with pytest.raises(MalformedResult, match="step 9"):
        decode_result(execution_pb2.StepResult(step_seq=9, slots=slots, token_ids=tokens, logprobs=logprobs))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"min_tokens": 5, "top_k": 3}, False),
    ],
)
def test_only_penalties_need_the_tokens_themselves(changes: dict[str, float], needed: bool) -> None:
    sampling = sampling_pb2.SamplingParameters(repetition_penalty=1.0)
    for name, value in changes.items():
        setattr(sampling, name, value)
    assert needs_history(sampling) is needed
