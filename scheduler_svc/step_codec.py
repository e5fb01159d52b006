"""Step plans and results between the core and the wire. The hot path: pure functions, few allocations."""

from __future__ import annotations

from collections.abc import Iterable

from chipmesh.device.v1alpha1 import execution_pb2, sampling_pb2
from scheduler_svc.core.structures import Admission, Request, Slot, SlotFailure, StepPlan, StepResult


class MalformedResult(Exception):
    """A result whose parts contradict each other: the executor does not keep the protocol."""


def encode_plans(plans: Iterable[StepPlan], *, epoch: int) -> execution_pb2.ExecuteStepsRequest:
    """The message of some plans.

    A request's payload must have `sampling` (SamplingParameters) and `traceparent` (str, may be empty).
    """
    message = execution_pb2.ExecuteStepsRequest()
    for plan in plans:
        _encode_plan(plan, message.plans.add(), epoch=epoch)
    return message


def _encode_plan(plan: StepPlan, target: execution_pb2.StepPlan, *, epoch: int) -> None:
    target.epoch = epoch
    target.step_seq = plan.step_seq
    target.decode = plan.decode
    if plan.released_slots:
        target.released_slots.extend(plan.released_slots)
    for admission in plan.admitted:
        _encode_admission(admission, target.admitted.add())
    for append in plan.pages:
        delta = target.pages.add()
        delta.slot = append.slot
        delta.page_ids.extend(append.page_ids)
    for chunk in plan.prefill:
        row = target.prefill.add()
        row.slot = chunk.slot
        row.start = chunk.start
        row.last = chunk.last
        row.token_ids.extend(chunk.token_ids)


def _encode_admission(admission: Admission, target: execution_pb2.AdmittedRequest) -> None:
    request = admission.request
    target.slot = admission.slot
    target.output_count = admission.output_count
    target.cached_tokens = admission.cached_tokens
    target.page_ids.extend(admission.page_ids)
    target.sampling.CopyFrom(request.payload.sampling)
    target.traceparent = request.payload.traceparent
    if request.needs_history:
        _encode_history(request, admission.output_count, target)


def _encode_history(request: Request, output_count: int, target: execution_pb2.AdmittedRequest) -> None:
    if penalises(request.payload.sampling):
        target.penalty_prompt_token_ids.extend(request.prompt)
    target.output_token_ids.extend(request.output[:output_count])


def decode_result(result: execution_pb2.StepResult) -> StepResult:
    """The core's form of a result.

    Raises:
        MalformedResult: slots, tokens and log-probabilities differ in number.
    """
    slots: list[Slot] = list(result.slots)  # type: ignore[arg-type]  # one call for each would cost the most
    token_ids = list(result.token_ids)
    logprobs = list(result.logprobs)
    if len(token_ids) != len(slots) or (logprobs and len(logprobs) != len(slots)):
        raise MalformedResult(
            f"step {result.step_seq} has {len(slots)} slots, {len(token_ids)} tokens "
            f"and {len(logprobs)} log-probabilities"
        )
    return StepResult(
        step_seq=result.step_seq,
        slots=slots,
        token_ids=token_ids,
        logprobs=logprobs,
        failures=tuple(
            SlotFailure(Slot(failure.slot), failure.reason, failure.message) for failure in result.failures
        ),
    )


def needs_history(sampling: sampling_pb2.SamplingParameters) -> bool:
    """Whether the executor wants the output's tokens themselves, not only their number."""
    return penalises(sampling) or sampling.HasField("constraint")


def penalises(sampling: sampling_pb2.SamplingParameters) -> bool:
    """Whether a penalty reads the tokens of prompt and output."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
