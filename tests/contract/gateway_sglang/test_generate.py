"""Generations as a router asks for them: chunks, ends, choices, aborts, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.contract.gateway_sglang.router_client import MeshFactory, RouterMesh
from tests.unit.gateway.tiny_model import CONTEXT_TOKENS, IM_END, tokens_of

STOP = session_pb2.RequestFinished.REASON_STOP


async def test_a_stream_has_new_tokens_with_counts_so_far_then_all_of_them(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(tokens_of("hello"), stream=True, request_id="r", params={})
    request = await session.submitted()
    request.queued()
    request.placed(cached_tokens=2)
    request.tokens(0, [65])
    first = await answers.chunk()
    request.tokens(1, [66, IM_END])
    request.finished(STOP)
    second = await answers.chunk()
    end = await answers.complete()
    assert (list(first.token_ids), first.completion_tokens) == ([65], 1)
    assert (list(second.token_ids), second.completion_tokens) == ([66, IM_END], 3)
    assert (second.prompt_tokens, second.cached_tokens, second.index) == (5, 2, 0)
    assert (list(end.output_ids), end.finish_reason) == ([65, 66, IM_END], "stop")
    assert end.matched_token_id == IM_END
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (5, 3, 2)


async def test_without_stream_there_is_one_message(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(params={"max_new_tokens": 2})
    request = await session.accepts()
    request.tokens(0, [65])
    request.tokens(1, [66])
    request.finished()
    message = await answers.next()
    assert message is not None
    assert len(message.request_id) == 32, "an id that was not given is drawn"
    assert list(message.complete.output_ids) == [65, 66]
    assert message.complete.finish_reason == "length"
    assert message.complete.WhichOneof("matched_stop") is None
    assert await answers.next() is None


async def test_a_raw_clients_zeros_reach_the_scheduler_with_their_meaning(mesh: RouterMesh) -> None:
    session = await mesh.session()
    greedy = mesh.generate(params={})
    submit = (await session.submitted()).submit
    assert list(submit.prompt_token_ids) == [1, 2, 3]
    assert (submit.sampling.temperature, submit.sampling.top_k) == (0.0, 0)
    assert (submit.sampling.top_p, submit.sampling.repetition_penalty) == (1.0, 1.0)
    assert submit.max_output_tokens == CONTEXT_TOKENS - 3
    assert list(submit.stop_token_ids) == [IM_END]
    greedy.call.cancel()
    default = mesh.generate()
    while (command := await session.next_command()).WhichOneof("command") != "submit":
        pass
    assert command.submit.sampling.temperature == 1.0
    default.call.cancel()


async def test_each_choice_has_its_number_and_its_end(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(stream=True, request_id="r", params={"n": 2, "temperature": 1.0})
    requests = [await session.accepts()]
    requests.append(await session.accepts())
    assert requests[0].submit.sampling.seed == requests[1].submit.sampling.seed
    for choice, request in enumerate(requests):
        request.tokens(0, [65 + choice])
        request.finished()
    messages = await answers.rest()
    ends = {
        each.complete.index: list(each.complete.output_ids) for each in messages if each.HasField("complete")
    }
    assert ends == {0: [65], 1: [66]}
    assert {each.chunk.index for each in messages if each.HasField("chunk")} == {0, 1}
    assert {each.request_id for each in messages} == {"r"}


async def test_logprobs_are_those_of_the_tokens_beside_them(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(stream=True, return_logprob=True, logprob_start_len=-1, params={})
    request = await session.accepts()
    request.tokens(0, [65, 66], [-0.5, -0.25])
    request.finished()
    chunk = await answers.chunk()
    assert list(chunk.output_logprobs.token_logprobs) == [-0.5, -0.25]
    assert list(chunk.output_logprobs.token_ids) == [65, 66]
    assert list((await answers.complete()).output_logprobs.token_logprobs) == [-0.5, -0.25]


async def test_a_stop_string_ends_it_and_is_named(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(params={"stop": ["BC"]})
    request = await session.accepts()
    request.tokens(0, tokens_of("ABCD"))
    end = await answers.complete()
    assert (end.finish_reason, end.matched_stop_str) == ("stop", "BC")
    assert list(end.output_ids) == tokens_of("ABC")
    assert await request.ended_by_gateway() == "stop"


async def test_an_abort_ends_all_choices_once_and_may_be_said_again(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(stream=True, request_id="r", params={"n": 2})
    first = await session.accepts()
    second = await session.accepts()
    first.tokens(0, [65])
    await answers.chunk()
    assert (await mesh.abort("r")).message == "request 'r' aborted"
    assert {await first.ended_by_gateway(), await second.ended_by_gateway()} == {"cancel"}
    ends = [message.complete for message in await answers.rest()]
    assert [(end.index, end.finish_reason, len(end.output_ids)) for end in ends] == [
        (0, "abort", 1),
        (1, "abort", 0),
    ]
    for name in ("r", "never was", "x" * 5000):
        again = await mesh.abort(name)
        assert again.success
        assert again.message.endswith("does not run here (any more)")


async def test_a_client_that_goes_away_ends_its_generation(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(stream=True, params={})
    request = await session.accepts()
    request.tokens(0, [65])
    await answers.chunk()
    answers.call.cancel()
    assert await request.ended_by_gateway() == "cancel"


async def test_the_callers_deadline_travels_on(mesh: RouterMesh) -> None:
    session = await mesh.session()
    answers = mesh.generate(timeout=15.0, params={})
    assert 10_000 < (await session.submitted()).submit.deadline_ms < 16_000  # gRPC rounds up
    answers.call.cancel()


async def test_an_end_is_stop_only_by_what_stopped_it(mesh: RouterMesh) -> None:
    """A generation that the scheduler ends at its limit says length, whatever its last token is."""
    session = await mesh.session()
    answers = mesh.generate(params={"ignore_eos": True, "max_new_tokens": 1})
    request = await session.accepts()
    assert list(request.submit.stop_token_ids) == []
    request.tokens(0, [IM_END])
    request.finished()
    end = await answers.complete()
    assert (end.finish_reason, end.WhichOneof("matched_stop")) == ("length", None)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tokenized.input_ids", {"prompt": []}),
        ("tokenized.input_ids", {"prompt": [1] * CONTEXT_TOKENS}),
        ("tokenized.input_ids[1]", {"prompt": [1, 70_000]}),
        ("sampling_params.temperature", {"params": {"temperature": math.nan}}),
        ("sampling_params.max_new_tokens", {"params": {"max_new_tokens": 0}}),
        ("sampling_params.min_new_tokens", {"params": {"min_new_tokens": 9, "max_new_tokens": 3}}),
        ("top_logprobs_num", {"top_logprobs_num": 2}),
        ("sampling_params.structural_tag", {"params": {"structural_tag": "{}"}}),
    ],
)
async def test_a_bad_request_is_the_callers_fault_and_the_next_one_works(
    mesh: RouterMesh, field: str, fields: dict[str, Any]
) -> None:
    session = await mesh.session()
    prompt = fields.pop("prompt", [1])
    error = await mesh.generate(prompt, **fields).error()
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert error.message.startswith(field)
    assert not session.has_commands
    answers = mesh.generate(params={})
    (await session.accepts()).finished()
    assert (await answers.complete()).finish_reason == "length"


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", ResourceExhausted),
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", NotFound),
        (grpc.StatusCode.UNAVAILABLE, "NO_REPLICA", Unavailable),
    ],
)
async def test_the_meshs_own_refusals_keep_their_codes(
    mesh: RouterMesh, code: grpc.StatusCode, reason: str, kind: type[Exception]
) -> None:
    session = await mesh.session()
    answers = mesh.generate(params={})
    (await session.submitted()).failed(code, reason, "not now")
    error = await answers.error()
    assert isinstance(error, kind)
    assert error.reason == reason


async def test_an_id_that_lives_is_followed_not_run_twice(mesh: RouterMesh) -> None:
    session = await mesh.session()
    first = mesh.generate(stream=True, request_id="r", params={})
    request = await session.accepts()
    request.tokens(0, [65])
    await first.chunk()
    second = mesh.generate(stream=True, request_id="r", params={})
    assert list((await second.chunk()).token_ids) == [65]
    other = await mesh.generate([9, 9], stream=True, request_id="r", params={}).error()
    assert isinstance(other, (AlreadyExists, InvalidArgument))
    request.finished()
    assert list((await first.complete()).output_ids) == list((await second.complete()).output_ids) == [65]
    assert not session.has_commands


async def test_a_model_of_token_ids_alone_generates_but_has_no_stop_strings(
    run_mesh: MeshFactory, token_model: Path
) -> None:
    async with run_mesh(model=token_model) as mesh:
        session = await mesh.session()
        error = await mesh.generate(params={"stop": ["x"]}).error()
        assert isinstance(error, FailedPrecondition)
        assert error.field == "sampling_params.stop"
        answers = mesh.generate(params={"max_new_tokens": 1})
        request = await session.accepts()
        request.tokens(0, [65])
        request.finished()
        assert list((await answers.complete()).output_ids) == [65]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("regex", "[ab]+", "[ab"),
        ("json_schema", '{"type": "integer"}', '{"type": 5}'),
        ("ebnf_grammar", 'root ::= "yes" | "no"', "root ::= ("),
    ],
)
async def test_a_constraint_reaches_the_scheduler_and_a_bad_one_is_the_callers_fault(
    mesh: RouterMesh, kind: str, good: str, bad: str
) -> None:
    session = await mesh.session()
    error = await mesh.generate(params={kind: bad}).error()
    assert isinstance(error, InvalidArgument)
    assert error.field == f"sampling_params.{kind}"
    answers = mesh.generate(params={kind: good})
    submit = (await session.submitted()).submit
    assert submit.sampling.HasField("constraint")
    answers.call.cancel()
