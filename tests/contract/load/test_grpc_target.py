"""The load driver against an InferenceService: what it sends, what it measures, what it makes of failures."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from meshkit.errors import InvalidArgument, MeshError
from meshkit.load import (
    ChatTurn,
    GrpcTarget,
    LoadRequest,
    describe_samples,
    multi_turn,
    random_tokens,
    run_closed_loop,
    run_open_loop,
)
from tests.contract.load.clock import ServedTime
from tests.contract.load.servers import Message, Script, serve_grpc
from tests.support.self_signed import write_self_signed

THREE_MESSAGES = (Message(0.5, (1,)), Message(0.1, (2, 3)), Message(0.2, (4,)))


def some_requests(count: int) -> list[LoadRequest]:
    return random_tokens(count, prompt_tokens=5, output_tokens=4, vocab_size=500, seed=1)


async def test_times_are_those_of_the_server() -> None:
    time, script = ServedTime(), Script(THREE_MESSAGES, cached_tokens=3)
    async with serve_grpc(script, time) as (address, _), GrpcTarget(address) as target:
        samples = await run_closed_loop(target, some_requests(2), concurrency=1, clock=time.clock)
    report = describe_samples(samples)
    assert report["completed"] == 2
    assert report["elapsed_s"] == pytest.approx(1.6)
    assert report["ttft_ms"] == {"mean": 500, "p50": 500, "p90": 500, "p95": 500, "p99": 500}
    assert report["tpot_ms"]["mean"] == pytest.approx(100)
    assert report["e2e_ms"]["p99"] == pytest.approx(800)
    assert report["message_gap_ms"]["mean"] == pytest.approx(150)
    # Two tokens came after 0.1 s, one after 0.2 s.
    assert report["itl_ms"]["mean"] == pytest.approx((50 + 50 + 200) / 3, abs=1e-3)
    assert report["itl_is_by"] == "token"
    assert report["tokens_per_message"] == pytest.approx(4 / 3, abs=1e-3)
    assert report["output_tokens_per_s"] == pytest.approx(8 / 1.6)
    assert report["total_tokens_per_s"] == pytest.approx(18 / 1.6)
    assert report["cached_share"] == pytest.approx(3 / 5)
    assert samples[0].token_ids == [1, 2, 3, 4]


async def test_a_request_says_how_long_and_how_greedy_it_is() -> None:
    script = Script(THREE_MESSAGES)
    request = LoadRequest(9, token_ids=(7, 8))
    async with serve_grpc(script) as (address, _), GrpcTarget(address, model="m", api_key="k") as target:
        await run_closed_loop(target, [request], concurrency=1)
    sent = script.seen[0]
    assert (sent.model, list(sent.prompt.tokens.token_ids)) == ("m", [7, 8])
    assert (sent.stop.max_tokens, sent.stop.ignore_eos) == (9, True)
    assert sent.sampling.HasField("temperature")
    assert sent.sampling.temperature == 0.0
    assert script.headers[0]["authorization"] == "Bearer k"


async def test_a_conversation_goes_on_after_its_answers() -> None:
    script = Script((Message(0, (1, 2)),))
    requests = multi_turn(2, turns=3, turn_tokens=4, output_tokens=2, vocab_size=500, system_tokens=3)
    async with serve_grpc(script) as (address, _), GrpcTarget(address) as target:
        samples = await run_closed_loop(target, requests, concurrency=2)
    assert [sample.error for sample in samples] == [None] * 6
    by_length = sorted((tuple(sent.prompt.tokens.token_ids) for sent in script.seen), key=len)
    assert [len(prompt) for prompt in by_length] == [7, 7, 13, 13, 19, 19]
    for longer in by_length[2:]:
        assert any(longer[: len(shorter) + 2] == (*shorter, 1, 2) for shorter in by_length)
    assert [sample.prompt_tokens for sample in samples] == [7, 7, 13, 13, 19, 19]


async def test_text_and_chat_go_on_after_their_answers_too() -> None:
    script = Script((Message(0, (1, 2)),))
    requests = [
        LoadRequest(2, text="one", session="t"),
        LoadRequest(2, text="two", session="t"),
        LoadRequest(2, messages=(ChatTurn("user", "hello"),), session="c"),
        LoadRequest(2, messages=(ChatTurn("user", "again"),), session="c"),
    ]
    async with serve_grpc(script) as (address, _), GrpcTarget(address) as target:
        await run_closed_loop(target, requests, concurrency=1)
    assert [sent.prompt.text for sent in script.seen[:2]] == ["one", "onexxtwo"]
    turns = [(turn.role, turn.content) for turn in script.seen[3].prompt.chat.messages]
    assert turns == [("user", "hello"), ("assistant", "xx"), ("user", "again")]


async def test_a_session_of_two_forms_is_refused() -> None:
    requests = [LoadRequest(2, text="one", session="s"), LoadRequest(2, token_ids=(1,), session="s")]
    async with serve_grpc(Script((Message(0, (1,)),))) as (address, _), GrpcTarget(address) as target:
        with pytest.raises(InvalidArgument, match="two forms"):
            await run_closed_loop(target, requests, concurrency=1)


async def test_as_many_at_once_as_asked_and_never_more() -> None:
    script = Script(THREE_MESSAGES, held_until=4)
    async with serve_grpc(script) as (address, _), GrpcTarget(address) as target:
        await run_closed_loop(target, some_requests(20), concurrency=4)
    assert (script.most_at_once, len(script.seen)) == (4, 20)
    script = Script(THREE_MESSAGES, held_until=3)
    all_at_once = [LoadRequest(4, token_ids=(1,), at_s=0.0) for _ in range(20)]
    async with serve_grpc(script) as (address, _), GrpcTarget(address) as target:
        await run_open_loop(target, all_at_once, max_concurrency=3)
    assert (script.most_at_once, len(script.seen)) == (3, 20)


async def test_failures_are_counted_by_code_and_fail_the_rest_of_their_session() -> None:
    requests = multi_turn(1, turns=3, turn_tokens=4, output_tokens=2, vocab_size=500)
    async with serve_grpc(Script()) as (address, servicer), GrpcTarget(address) as target:
        servicer.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queues are full")
        samples = await run_closed_loop(target, requests, concurrency=2)
    report = describe_samples(samples)
    assert (report["failed"], report["completed"]) == (3, 0)
    assert report["errors"]["RESOURCE_EXHAUSTED"] == {"count": 1, "example": "queues are full"}
    assert report["errors"]["PREVIOUS_TURN_FAILED"]["count"] == 2


async def test_a_stream_without_its_end_has_failed() -> None:
    async with serve_grpc(Script(THREE_MESSAGES, cut=True)) as (address, _), GrpcTarget(address) as target:
        samples = await run_closed_loop(target, some_requests(1), concurrency=1)
    assert samples[0].error == "UNAVAILABLE/STREAM_CUT"
    assert samples[0].token_ids == [1, 2, 3, 4]


async def test_warm_up_is_sent_and_not_counted() -> None:
    time, script = ServedTime(), Script(THREE_MESSAGES)
    async with serve_grpc(script, time) as (address, servicer), GrpcTarget(address) as target:
        samples = await run_closed_loop(
            target, some_requests(1), concurrency=1, warmup=some_requests(3), clock=time.clock
        )
        assert len(script.seen) == 4
        assert describe_samples(samples)["elapsed_s"] == pytest.approx(0.8)
        servicer.error = (grpc.StatusCode.UNAVAILABLE, "not today")
        with pytest.raises(MeshError, match="not today"):
            await run_closed_loop(target, some_requests(1), concurrency=1, warmup=some_requests(1))


async def test_an_open_loop_sends_at_the_time_however_slow_answers_are() -> None:
    time, script = ServedTime(), Script(THREE_MESSAGES)
    requests = [LoadRequest(4, token_ids=(1,), at_s=at_s) for at_s in (2.0, 0.5, 1.0)]
    async with serve_grpc(script) as (address, _), GrpcTarget(address) as target:
        began_s = time.now_s
        samples = await run_open_loop(target, requests, clock=time.clock)
    assert [sample.due_s for sample in samples] == [began_s + at_s for at_s in (2.0, 0.5, 1.0)]
    assert samples[1].sent_s - began_s == pytest.approx(0.5)
    assert time.now_s - began_s == pytest.approx(2.0)
    assert all(sample.error is None for sample in samples)


async def test_cancelling_the_run_ends_all_streams_at_the_server() -> None:
    script = Script(THREE_MESSAGES, hang=True)
    async with serve_grpc(script) as (address, _), GrpcTarget(address) as target:
        for run in (
            run_closed_loop(target, some_requests(3), concurrency=3),
            run_open_loop(target, [LoadRequest(4, token_ids=(1,), at_s=0.0) for _ in range(3)]),
        ):
            script.hanging.clear()
            script.ended.clear()
            running = asyncio.create_task(run)
            await asyncio.wait_for(script.hanging.wait(), timeout=10)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            assert running.cancelled()
            await asyncio.wait_for(script.ended.wait(), timeout=10)
            assert script.at_once == 0


async def test_an_error_of_a_session_ends_an_open_loop_at_once() -> None:
    requests = [
        LoadRequest(2, text="one", session="s", at_s=0.0),
        LoadRequest(2, token_ids=(1,), session="s", at_s=0.0),
        LoadRequest(2, token_ids=(1,), at_s=3600.0),
    ]
    async with serve_grpc(Script((Message(0, (1,)),))) as (address, _), GrpcTarget(address) as target:
        run = asyncio.create_task(run_open_loop(target, requests))
        with pytest.raises(InvalidArgument, match="two forms"):
            await asyncio.wait_for(run, timeout=10)


async def test_the_model_is_found_by_name_or_alone() -> None:
    async with serve_grpc(Script()) as (address, _):
        async with GrpcTarget(address) as target:
            assert (await target.choose_model()).vocab_size == 500
        async with GrpcTarget(address, model="other") as target:
            with pytest.raises(InvalidArgument, match=r"served at .*: scripted"):
                await target.choose_model()


@pytest.mark.parametrize(
    ("concurrency", "count", "field"), [(0, 1, "concurrency"), (-1, 1, "concurrency"), (1, 0, "requests")]
)
async def test_a_run_of_nothing_is_refused(concurrency: int, count: int, field: str) -> None:
    requests = some_requests(1)[:count]
    with pytest.raises(InvalidArgument) as refused:
        await run_closed_loop(GrpcTarget("127.0.0.1:1"), requests, concurrency=concurrency)
    assert refused.value.field == field


async def test_an_open_loop_wants_arrivals() -> None:
    with pytest.raises(InvalidArgument, match="at_s"):
        await run_open_loop(GrpcTarget("127.0.0.1:1"), some_requests(1))
    with pytest.raises(InvalidArgument, match="max_concurrency is 0"):
        await run_open_loop(GrpcTarget("127.0.0.1:1"), some_requests(1), max_concurrency=0)


async def test_a_gateway_in_tls_is_reached_by_those_who_know_its_authority(tmp_path: Path) -> None:
    certificate = write_self_signed(tmp_path)
    pair = ((tmp_path / "key.pem").read_bytes(), certificate)
    async with serve_grpc(Script(THREE_MESSAGES), key_and_certificate=pair) as (address, _):
        async with GrpcTarget(address, authority=str(tmp_path / "certificate.pem")) as target:
            known = await run_closed_loop(target, some_requests(1), concurrency=1)
        async with GrpcTarget(address, authority="system") as target:
            unknown = await run_closed_loop(target, some_requests(1), concurrency=1)
    assert (known[0].error, known[0].token_ids) == (None, [1, 2, 3, 4])
    assert unknown[0].error == "UNAVAILABLE"


async def test_an_authority_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="authority"):
        async with GrpcTarget("127.0.0.1:1", authority="/no/such/file"):
            pass
