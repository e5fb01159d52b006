"""A request that is sent again with the tokens that came for it goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import AlreadyExists, InvalidArgument
from tests.contract.gateway.fake_scheduler import FakeSession
from tests.contract.gateway.gateway_client import Mesh, MeshFactory, Stream
from tests.unit.gateway.tiny_model import CONTEXT_TOKENS, IM_END, VOCAB_SIZE, tokens_of

STOP = session_pb2.RequestFinished.REASON_STOP
GREEDY = {"temperature": 0.0}


def go_on(mesh: Mesh, tokens: Sequence[int], *args: Any, **fields: Any) -> Stream:
    """A generation after `tokens`."""
    stream = mesh.generate(*args, **fields, output_token_ids=tokens)
    stream.expect_from(len(tokens))
    return stream


async def play(
    session: FakeSession, tokens: Sequence[int], *, logprobs: bool = False
) -> session_pb2.SubmitRequest:
    """Take the next request as a scheduler does whose model says `tokens`, one by one, to their end."""
    request = await session.accepts()
    done = len(request.submit.output_token_ids)
    assert list(request.submit.output_token_ids) == list(tokens[:done])
    for index in range(done, len(tokens)):
        request.tokens(index, [tokens[index]], [-float(index)] if logprobs else [])
    request.finished(STOP)
    return request.submit


async def test_a_request_goes_on_after_the_tokens_that_it_brings(mesh: Mesh) -> None:
    session = await mesh.session()
    tokens = [*tokens_of("ab漢c"), IM_END]
    asked: dict[str, Any] = {
        "sampling": {"temperature": 0.5, "seed": 7},
        "stop": {"max_tokens": 50, "min_tokens": 2},
    }
    whole = mesh.generate("hello", **asked)
    undisturbed = await play(session, tokens)
    finished = await whole.end()
    stream = go_on(mesh, tokens[:3], "hello", **asked)
    submit = await play(session, tokens)
    assert await stream.end() == finished
    assert stream.token_ids == tokens[3:]
    assert stream.text == "漢c"
    assert finished.usage == pb.Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=0)
    assert (submit.sampling, submit.max_output_tokens) == (
        undisturbed.sampling,
        undisturbed.max_output_tokens,
    )
    assert submit.sampling.min_tokens == 2


async def test_logprobs_go_on_with_their_tokens(mesh: Mesh) -> None:
    session = await mesh.session()
    tokens = tokens_of("abcd")
    stream = go_on(mesh, tokens[:2], "hello", sampling=GREEDY, logprobs=True, request_id="mine")
    await play(session, tokens, logprobs=True)
    await stream.end()
    assert stream.logprobs == [-2.0, -3.0]
    # Those of the first two were made elsewhere, so nobody can be told them here.
    for refused in (
        mesh.resume("mine", 1),
        go_on(mesh, [97], "hello", sampling=GREEDY, logprobs=True, request_id="mine"),
    ):
        error = await refused.error()
        assert isinstance(error, InvalidArgument)
        assert error.reason == "LOGPROBS_NOT_KNOWN"
        assert "tokens 1 to 1" in error.message


async def test_cached_tokens_of_a_request_that_goes_on_are_those_of_its_prompt(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = go_on(mesh, tokens_of("x" * 20), "hello", sampling=GREEDY)
    request = await session.submitted()
    request.queued()
    request.placed(cached_tokens=24)
    request.finished()
    assert (await stream.end()).usage == pb.Usage(prompt_tokens=5, completion_tokens=20, cached_tokens=5)


@pytest.mark.parametrize(
    ("tokens", "stop", "reason", "matched"),
    [
        ([97, IM_END], {}, pb.Finished.REASON_STOP, ""),
        (tokens_of("abc"), {"max_tokens": 3}, pb.Finished.REASON_LENGTH, ""),
        (tokens_of("aEND"), {"stop_strings": ["END"]}, pb.Finished.REASON_STOP, "END"),
        ([1] * (CONTEXT_TOKENS - 5), {}, pb.Finished.REASON_LENGTH, ""),
    ],
    ids=["end token", "max_tokens", "stop string", "context"],
)
async def test_tokens_that_end_the_generation_are_accepted_and_finished(
    mesh: Mesh, tokens: list[int], stop: dict[str, Any], reason: int, matched: str
) -> None:
    session = await mesh.session()
    stream = go_on(mesh, tokens, "hello", sampling=GREEDY, stop=stop)
    finished = await stream.end()
    assert stream.accepted is not None
    assert (finished.reason, finished.matched_stop) == (reason, matched)
    assert finished.usage.completion_tokens == len(tokens)
    assert not stream.outputs
    assert not session.has_commands
    assert mesh.gateway.live_count == 0


async def test_text_held_back_to_the_end_comes_again_for_who_did_not_see_the_end(mesh: Mesh) -> None:
    await mesh.session()
    half = tokens_of("ok🙂")[:-1]
    stream = go_on(mesh, half, "hello", sampling=GREEDY, stop={"max_tokens": len(half)})
    await stream.end()
    assert stream.text == "\ufffd"
    assert [list(output.token_ids) for output in stream.outputs] == [[]]


BAD: list[tuple[list[int], dict[str, Any], str, str]] = [
    ([5, VOCAB_SIZE], {"sampling": GREEDY}, "output_token_ids[1]", f"0 to {VOCAB_SIZE - 1}"),
    ([97, IM_END, 98], {"sampling": GREEDY}, "output_token_ids[2]", "complete with 2 tokens (stop)"),
    (
        tokens_of("a.b"),
        {"sampling": GREEDY, "stop": {"stop_strings": ["."]}},
        "output_token_ids[2]",
        "(stop)",
    ),
    (tokens_of("abc"), {"sampling": GREEDY, "stop": {"max_tokens": 2}}, "output_token_ids", "at most 2"),
    ([1] * (CONTEXT_TOKENS - 4), {"sampling": GREEDY}, "output_token_ids", f"at most {CONTEXT_TOKENS - 5}"),
    ([97], {}, "sampling.seed", "accepted.effective_sampling"),
    ([97], {"sampling": {"temperature": 0.1}}, "sampling.seed", "1 output_token_ids"),
]


async def test_output_that_no_generation_can_have_made_is_refused_by_its_field(mesh: Mesh) -> None:
    session = await mesh.session()
    for tokens, fields, field, part in BAD:
        error = await go_on(mesh, tokens, "hello", **fields).error()
        assert isinstance(error, InvalidArgument), (field, error)
        assert error.field == field
        assert error.message.startswith(field)
        assert part in error.message
    assert not session.has_commands
    assert mesh.gateway.live_count == 0


# The id of a request makes sending it again safe.


async def test_the_same_request_under_its_id_follows_the_live_one(mesh: Mesh) -> None:
    session = await mesh.session()
    first = mesh.generate("hello", request_id="mine")
    request = await session.accepts()
    request.tokens(0, tokens_of("abc"))
    accepted = await first.start()
    await first.until_text(3)
    # As it was asked for, and with what was told since.
    same = [
        go_on(mesh, [], "hello", request_id="mine"),
        go_on(mesh, tokens_of("ab"), "hello", request_id="mine", sampling=accepted.effective_sampling),
        go_on(mesh, tokens_of("abc"), list(accepted.prompt_token_ids), request_id="mine",
              sampling=accepted.effective_sampling, stop=accepted.effective_stop,
              scheduling={"priority": 5}),
    ]  # fmt: skip
    for stream in same:
        assert await stream.start() == accepted
    first.call.cancel()
    request.tokens(3, tokens_of("d"))
    request.finished()
    for stream, expected in zip(same, ["abcd", "cd", "d"], strict=True):
        finished = await stream.end()
        assert stream.text == expected
        assert finished.usage.completion_tokens == 4
    assert not session.has_commands


async def test_the_same_request_follows_one_that_ended_a_short_while_ago(mesh: Mesh) -> None:
    session = await mesh.session()
    first = mesh.generate("hello", request_id="mine")
    await play(session, tokens_of("abc"))
    finished = await first.end()
    again = mesh.generate("hello", request_id="mine")
    assert await again.end() == finished
    assert (again.accepted, again.token_ids, again.text) == (first.accepted, first.token_ids, first.text)
    assert not session.has_commands


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("hullo", {}, "prompt"),
    ("hello", {"sampling": {"temperature": 0.5, "seed": 7}}, "sampling.temperature"),
    ("hello", {"sampling": {"seed": 8}}, "sampling.seed"),
    ("hello", {"sampling": {}}, "sampling.seed"),
    ("hello", {"sampling": {"seed": 7, "logit_bias": {5: 1.0}}}, "sampling.logit_bias"),
    ("hello", {"stop": {"max_tokens": 7}}, "stop"),
    ("hello", {"stop": {"stop_strings": ["x"]}}, "stop"),
    ("hello", {"logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
async def test_another_request_under_a_taken_id_never_gets_its_tokens(mesh: Mesh, ended: bool) -> None:
    session = await mesh.session()
    first = mesh.generate("hello", request_id="mine", sampling={"seed": 7})
    request = await session.accepts()
    request.tokens(0, tokens_of("abc"))
    await first.start()
    if ended:
        request.finished()
        await first.end()
    for prompt, fields, differs in OTHERS:
        stream = mesh.generate(prompt, request_id="mine", **{"sampling": {"seed": 7}, **fields})
        error = await stream.error()
        assert isinstance(error, AlreadyExists), differs
        assert (error.field, error.metadata["differs"]) == ("request_id", differs)
        assert f"'mine' belongs to a request here whose {differs} differs" in error.message
        assert stream.accepted is None
    if not ended:
        request.finished()
        await first.end()
    assert first.text == "abc"
    assert not session.has_commands


async def test_a_model_of_another_name_is_another_request(run_mesh: MeshFactory) -> None:
    models = [{"name": name, "context_length": 100, "vocab_size": 300} for name in ("a", "b")]
    async with run_mesh(models=models) as mesh:
        session = await mesh.session()
        first = mesh.generate([1, 2], model="a", request_id="mine")
        (await session.accepts()).finished()
        await first.end()
        error = await mesh.generate([1, 2], model="b", request_id="mine").error()
        assert isinstance(error, AlreadyExists)
        assert error.metadata["differs"] == "model"


async def test_where_nothing_is_drawn_the_seed_makes_no_other_request(mesh: Mesh) -> None:
    session = await mesh.session()
    first = mesh.generate("hello", request_id="mine", sampling=GREEDY)
    await play(session, tokens_of("abc"))
    await first.end()
    again = go_on(mesh, [97], "hello", request_id="mine", sampling={"temperature": 0.0, "seed": 5})
    await again.end()
    assert again.text == "bc"


async def test_tokens_that_differ_from_the_live_requests_name_the_first_such_index(mesh: Mesh) -> None:
    session = await mesh.session()
    first = mesh.generate("hello", request_id="mine", sampling=GREEDY)
    request = await session.accepts()
    request.tokens(0, tokens_of("abcd"))
    await first.start()
    await first.until_text(4)
    error = await go_on(mesh, tokens_of("abxd"), "hello", request_id="mine", sampling=GREEDY).error()
    assert isinstance(error, InvalidArgument)
    assert error.field == "output_token_ids[2]"
    assert f"is {ord('x')}, but token 2 of request 'mine' is {ord('c')}" in error.message
    request.finished()
    await first.end()
    assert first.text == "abcd", "a refused reader ends nobody's request"
    error = await go_on(mesh, tokens_of("abcde"), "hello", request_id="mine", sampling=GREEDY).error()
    assert isinstance(error, InvalidArgument)
    assert error.field == "output_token_ids[4]"


@pytest.mark.parametrize(("third", "agrees"), [("c", True), ("x", False)])
async def test_a_client_that_got_further_elsewhere_is_waited_for(
    mesh: Mesh, third: str, agrees: bool
) -> None:
    session = await mesh.session()
    first = mesh.generate([5, 6], request_id="mine", sampling=GREEDY)
    request = await session.accepts()
    request.tokens(0, tokens_of("a"))
    await first.start()
    await first.until_text(1)
    ahead = go_on(mesh, tokens_of("ab" + third), [5, 6], request_id="mine", sampling=GREEDY)
    await mesh.tokenize("x")  # Came later on the same connection: the gateway waits for those tokens by now.
    request.tokens(1, tokens_of("bcd"))
    await first.until_text(4)
    request.finished()
    if agrees:
        await ahead.end()
        assert ahead.text == "d"
    else:
        error = await ahead.error()
        assert isinstance(error, InvalidArgument)
        assert error.field == "output_token_ids[2]"
    await first.end()


async def test_a_request_that_failed_or_was_cancelled_is_begun_anew(mesh: Mesh) -> None:
    session = await mesh.session()
    first = mesh.generate("hello", request_id="mine", sampling=GREEDY)
    request = await session.accepts()
    request.tokens(0, tokens_of("ab"))
    await first.start()
    await first.until_text(2)
    first.call.cancel()
    assert await request.ended_by_gateway() == "cancel"
    second = go_on(mesh, tokens_of("ab"), "hello", request_id="mine", sampling=GREEDY)
    request = await session.accepts()
    assert list(request.submit.output_token_ids) == tokens_of("ab")
    request.tokens(2, tokens_of("c"))
    request.failed(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "all are gone")
    assert (await second.error()).reason == "NO_WORKER"
    third = go_on(mesh, tokens_of("abc"), "hello", request_id="mine", sampling=GREEDY)
    await play(session, tokens_of("abcd"))
    await third.end()
    assert second.text + third.text == "cd"


async def test_a_request_sent_twice_at_once_runs_once(mesh: Mesh) -> None:
    session = await mesh.session()
    streams = [mesh.generate("hello", request_id="mine") for _ in range(8)]
    await play(session, tokens_of("abc"))
    for stream in streams:
        await stream.end()
        assert stream.text == "abc"
    assert (
        len({stream.accepted.SerializeToString(deterministic=True) for stream in streams if stream.accepted})
        == 1
    )
    assert not session.has_commands


async def test_a_request_may_ask_for_time_to_come_back_in(mesh: Mesh) -> None:
    session = await mesh.session()
    asked: dict[str, Any] = {"request_id": "mine", "scheduling": {"resume_window_ms": 60_000}}
    first = mesh.generate("hello", **asked)
    request = await session.accepts()
    request.tokens(0, tokens_of("ab"))
    accepted = await first.start()
    await first.until_text(2)
    first.call.cancel()
    other = mesh.generate([5])
    (await session.accepts()).finished()  # And no cancel before it.
    await other.end()
    request.tokens(2, tokens_of("cd"))
    request.finished()
    again = go_on(mesh, tokens_of("ab"), "hello", **asked, sampling=accepted.effective_sampling)
    await again.end()
    assert again.text == "cd"


async def test_a_request_may_ask_to_be_cancelled_at_once(run_mesh: MeshFactory) -> None:
    async with run_mesh(resume_window_s=30.0) as mesh:
        session = await mesh.session()
        stream = mesh.generate("hello", scheduling={"resume_window_ms": 0})
        request = await session.accepts()
        await stream.start()
        stream.call.cancel()
        assert await request.ended_by_gateway() == "cancel"
