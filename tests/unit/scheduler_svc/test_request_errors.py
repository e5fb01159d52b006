"""What the core refuses reaches a client as a canonical code with the numbers in it."""

from __future__ import annotations

import grpc
import pytest

from meshkit.errors import ResourceExhausted
from scheduler_svc.core.errors import QueueFull, RequestTooLarge, SchedulerError, UnknownModel
from scheduler_svc.core.structures import Failed, Request, RequestId
from scheduler_svc.request_errors import error_of_failure, refusal


@pytest.mark.parametrize(
    ("error", "code", "field", "mentioned"),
    [
        (UnknownModel("x", ["m"]), grpc.StatusCode.NOT_FOUND, "model", ["'x'", "m"]),
        (QueueFull(7, waiting=7, what="requests"), grpc.StatusCode.RESOURCE_EXHAUSTED, None, ["7"]),
        (
            RequestTooLarge(tokens=120, room_tokens=100),
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt_token_ids",
            ["120", "100", "99"],
        ),
        (
            RequestTooLarge(tokens=50, room_tokens=40),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "prompt_token_ids",
            ["50", "40"],
        ),
    ],
)
def test_each_refusal_has_its_code_and_field(
    error: SchedulerError, code: grpc.StatusCode, field: str | None, mentioned: list[str]
) -> None:
    mapped = refusal(error, context_tokens=100, retry_after_s=0.5)
    assert (mapped.code, mapped.field) == (code, field)
    assert all(word in mapped.message for word in mentioned)


def test_a_full_queue_says_when_to_come_back() -> None:
    mapped = refusal(QueueFull(7, waiting=7, what="requests"), context_tokens=None, retry_after_s=2.5)
    assert isinstance(mapped, ResourceExhausted)
    assert mapped.retry_after_s is not None
    assert mapped.reason == "QUEUE_FULL"


def test_a_fault_of_the_core_tells_a_client_nothing_of_the_inside() -> None:
    mapped = refusal(SchedulerError("slot 3 of radix node 7"), context_tokens=None, retry_after_s=0.0)
    assert mapped.code is grpc.StatusCode.INTERNAL
    assert "radix" not in mapped.message


def test_a_failure_keeps_its_reason_and_text() -> None:
    request = Request(id=RequestId(1), model="m", prompt=[1], max_output_tokens=1)
    mapped = error_of_failure(
        Failed(request, "NON_FINITE_LOGITS", "the logits are not finite"), request_id="mine"
    )
    assert (mapped.code, mapped.reason) == (grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS")
    assert mapped.message == "request 'mine': the logits are not finite"
