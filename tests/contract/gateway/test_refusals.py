"""Requests that cannot be served: each refusal names the field, the value, the limit, and comes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from meshkit.errors import InvalidArgument, MeshError, ResourceExhausted
from tests.contract.gateway.gateway_client import Mesh, MeshFactory, Stream
from tests.unit.gateway.tiny_model import CONTEXT_TOKENS, VOCAB_SIZE

Case = tuple[Any, dict[str, Any], str, str]

FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


def _not_finite() -> list[Case]:
    return [
        ("hi", {"sampling": {name: value}}, f"sampling.{name}", shown)
        for name in FLOATS
        for value, shown in ((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"))
    ]


CASES: list[Case] = [
    ("", {}, "prompt.text", "empty"),
    ([("user", "hi"), ("wizard", "hi")], {}, "prompt.chat", "wizard"),
    ([1, 2, VOCAB_SIZE], {}, "prompt.tokens.token_ids[2]", f"0 to {VOCAB_SIZE - 1}"),
    ([1] * CONTEXT_TOKENS, {}, "prompt.tokens.token_ids", str(CONTEXT_TOKENS)),
    ("x" * CONTEXT_TOKENS, {}, "prompt.text", str(CONTEXT_TOKENS)),
    ([("user", "x" * CONTEXT_TOKENS)], {}, "prompt.chat", str(CONTEXT_TOKENS)),
    ("x" * 3000, {}, "prompt.text", "2048"),
    ("hi", {"stop": {"max_tokens": 0}}, "stop.max_tokens", "is 0"),
    ("hi", {"stop": {"max_tokens": -5}}, "stop.max_tokens", "is -5"),
    ("hi", {"stop": {"max_tokens": 3, "min_tokens": 4}}, "stop.min_tokens", "at most 3"),
    ("hi", {"stop": {"min_tokens": CONTEXT_TOKENS}}, "stop.min_tokens", str(CONTEXT_TOKENS - 2)),
    ("hi", {"stop": {"stop_strings": [str(index) for index in range(17)]}}, "stop.stop_strings", "16"),
    ("hi", {"stop": {"stop_strings": ["ok", ""]}}, "stop.stop_strings[1]", "1 to 256"),
    ("hi", {"stop": {"stop_strings": ["x" * 257]}}, "stop.stop_strings[0]", "257"),
    ("hi", {"stop": {"stop_token_ids": [5, VOCAB_SIZE]}}, "stop.stop_token_ids[1]", str(VOCAB_SIZE)),
    ("hi", {"sampling": {"temperature": -0.1}}, "sampling.temperature", "-0.1"),
    ("hi", {"sampling": {"temperature": 101}}, "sampling.temperature", "0 to 100"),
    ("hi", {"sampling": {"top_k": -2}}, "sampling.top_k", "-2"),
    ("hi", {"sampling": {"top_p": 0}}, "sampling.top_p", "above 0 to 1"),
    ("hi", {"sampling": {"top_p": 1.5}}, "sampling.top_p", "1.5"),
    ("hi", {"sampling": {"min_p": -0.5}}, "sampling.min_p", "-0.5"),
    ("hi", {"sampling": {"min_p": 1.5}}, "sampling.min_p", "1.5"),
    ("hi", {"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty", "above 0"),
    ("hi", {"sampling": {"repetition_penalty": 10.5}}, "sampling.repetition_penalty", "10.5"),
    ("hi", {"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty", "from -2 to 2"),
    ("hi", {"sampling": {"frequency_penalty": -2.5}}, "sampling.frequency_penalty", "-2.5"),
    ("hi", {"sampling": {"logit_bias": {VOCAB_SIZE: 1.0}}}, f"sampling.logit_bias[{VOCAB_SIZE}]", "ids"),
    ("hi", {"sampling": {"logit_bias": {3: 101.0}}}, "sampling.logit_bias[3]", "-100 to 100"),
    ("hi", {"sampling": {"logit_bias": {3: math.nan}}}, "sampling.logit_bias[3]", "nan"),
    ("hi", {"request_id": "x" * 129}, "request_id", "128"),
    ("hi", {"scheduling": {"resume_window_ms": 60_001}}, "scheduling.resume_window_ms", "0 to 60000"),
    ("hi", {"request_id": "a\nb"}, "request_id", "printable"),
    *_not_finite(),
]


async def test_every_bad_input_names_its_field_and_never_reaches_the_scheduler(run_mesh: MeshFactory) -> None:
    async with run_mesh(max_prompt_bytes=2048) as mesh:
        session = await mesh.session()
        for prompt, fields, field, part in CASES:
            error = await mesh.generate(prompt, **fields).error()
            assert isinstance(error, InvalidArgument), (field, error)
            assert error.field == field
            assert error.message.startswith(field)
            assert part in error.message
            assert not session.has_commands
        # Refused requests leave nothing behind, and the next good one is served.
        stream = mesh.generate("hi")
        request = await session.accepts()
        request.finished()
        await stream.end()


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (pb.Prompt(), "prompt"),
        (pb.Prompt(chat=pb.ChatPrompt()), "prompt.chat.messages"),
        (pb.Prompt(tokens=pb.TokenPrompt()), "prompt.tokens.token_ids"),
    ],
)
async def test_a_prompt_without_content_names_what_is_missing(
    mesh: Mesh, prompt: pb.Prompt, field: str
) -> None:
    error = await Stream(mesh.stub.Generate(pb.GenerateRequest(prompt=prompt))).error()
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_an_unknown_model_is_not_found_and_the_served_ones_are_listed(
    run_mesh: MeshFactory, tiny_model: Path, token_model: Path
) -> None:
    models = [{"name": "a", "path": str(tiny_model)}, {"name": "b", "path": str(token_model)}]
    async with run_mesh(models=models) as mesh:
        error = await mesh.generate("hi", model="c").error()
        assert error.code is grpc.StatusCode.NOT_FOUND
        assert error.field == "model"
        assert "a, b" in error.message
        error = await mesh.generate("hi").error()
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "a, b" in error.message


async def test_more_live_requests_than_allowed_are_told_when_to_come_back(run_mesh: MeshFactory) -> None:
    async with run_mesh(max_live_requests=2) as mesh:
        session = await mesh.session()
        streams = [mesh.generate("hi") for _ in range(2)]
        requests = [await session.accepts() for _ in streams]
        error = await mesh.generate("hi").error()
        assert isinstance(error, ResourceExhausted)
        assert error.retry_after_s is not None
        assert error.retry_after_s >= 0.05
        assert "limit is 2" in error.message
        requests[0].finished()
        requests[1].finished()
        for stream in streams:
            await stream.end()
        stream = mesh.generate("hi")
        (await session.accepts()).finished()
        await stream.end()


async def test_a_refusal_by_the_scheduler_is_the_clients_error(mesh: Mesh) -> None:
    session = await mesh.session()
    cases: Sequence[tuple[grpc.StatusCode, str, str]] = [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", ""),
        (grpc.StatusCode.UNAVAILABLE, "NO_WORKER", ""),
        (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE", "prompt"),
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", "model"),
    ]
    for code, reason, field in cases:
        stream = mesh.generate("hi", request_id="again")
        (await session.submitted()).failed(code, reason, f"no, since {reason}", field)
        error = await stream.error()
        assert stream.accepted is None
        assert error.code is code
        assert error.reason == reason
        assert error.message == f"no, since {reason}"
        assert error.field == (field or None)
        assert isinstance(error, ResourceExhausted) is (code is grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_a_failure_after_accepted_ends_the_stream_with_that_error(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    request.tokens(0, [97])
    request.failed(grpc.StatusCode.ABORTED, "POISONED", "two workers died of it")
    error: MeshError = await stream.error()
    assert stream.text == "a"
    assert error.reason == "POISONED"
    assert stream.accepted is not None
    resumed = mesh.resume(stream.accepted.request_id, 0)
    assert (await resumed.error()).reason == "POISONED"
    assert resumed.text == "a"


async def test_a_gap_that_another_session_has_too_is_an_error_and_the_scheduler_is_told(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    request.tokens(0, [97])
    request.tokens(2, [99])
    request = await (await mesh.scheduler.session()).accepts()
    request.tokens(2, [99])
    error = await stream.error()
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.reason == "TOKENS_LOST"
    assert stream.token_ids == [97]
    assert await request.ended_by_gateway() == "cancel"


async def test_tokens_sent_twice_are_taken_once(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi", logprobs=True)
    request = await session.accepts()
    request.tokens(0, [97, 98], [-0.5, -1.0])
    request.tokens(0, [97, 98], [-0.5, -1.0])
    request.tokens(1, [98, 99], [-1.0, -1.5])
    request.finished()
    finished = await stream.end()
    assert stream.token_ids == [97, 98, 99]
    assert stream.logprobs == [-0.5, -1.0, -1.5]
    assert finished.usage.completion_tokens == 3


async def test_tokenize_refuses_as_generate_does(
    mesh: Mesh, run_mesh: MeshFactory, token_model: Path
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.tokenize("")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with run_mesh(models=[{"name": "tokens", "path": str(token_model)}]) as other:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.tokenize("text")
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "tokenizer.json" in str(caught.value.details())
