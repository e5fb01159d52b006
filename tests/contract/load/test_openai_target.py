"""The load driver against servers of OpenAI's HTTP interface, each with its own way to tell token counts."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError
from meshkit.load import (
    ChatTurn,
    LoadRequest,
    OpenAiTarget,
    describe_samples,
    multi_turn,
    random_tokens,
    run_closed_loop,
)
from tests.contract.load.clock import ServedTime
from tests.contract.load.servers import Message, OpenAiManners, Script, serve_openai

PAIRS = (Message(0.5, (1, 2)), Message(0.1, (3, 4)), Message(0.2, (5, 6)))
SINGLES = (Message(0.5, (1,)), Message(0.1, (2,)), Message(0.2, (3,)))
REQUEST = LoadRequest(6, token_ids=(7, 8, 9))


async def test_one_token_a_chunk_is_recognised_by_usage() -> None:
    time = ServedTime()
    async with serve_openai(Script(SINGLES, cached_tokens=2), time=time) as url, OpenAiTarget(url) as target:
        samples = await run_closed_loop(
            target, [LoadRequest(3, token_ids=(7, 8, 9))] * 2, concurrency=1, clock=time.clock
        )
    report = describe_samples(samples)
    assert report["ttft_ms"]["p50"] == pytest.approx(500)
    assert report["tpot_ms"]["p50"] == pytest.approx(150)
    assert report["itl_ms"]["mean"] == pytest.approx(150)
    assert (report["itl_is_by"], report["notes"]) == ("token", [])
    assert (report["output_tokens"], report["prompt_tokens"]) == (6, 6)
    assert report["cached_tokens"] == 4


async def test_several_tokens_a_chunk_are_counted_by_usage_and_itl_is_by_message() -> None:
    time = ServedTime()
    async with serve_openai(Script(PAIRS), time=time) as url, OpenAiTarget(url) as target:
        samples = await run_closed_loop(target, [REQUEST], concurrency=1, clock=time.clock)
    report = describe_samples(samples)
    assert report["output_tokens"] == 6
    assert report["itl_is_by"] == "message"
    assert "ITL is by message" in report["notes"][0]
    assert report["tpot_ms"]["p50"] == pytest.approx(300 / 5)
    assert report["itl_ms"]["mean"] == pytest.approx(150)
    assert report["tokens_per_message"] == 2


@pytest.mark.parametrize("manners", [OpenAiManners(tell_ids=True), OpenAiManners(running_usage=True)])
async def test_a_server_that_says_how_many_tokens_a_chunk_has_is_believed(manners: OpenAiManners) -> None:
    time = ServedTime()
    async with serve_openai(Script(PAIRS), manners, time) as url, OpenAiTarget(url) as target:
        samples = await run_closed_loop(target, [REQUEST], concurrency=1, clock=time.clock)
    report = describe_samples(samples)
    assert (report["output_tokens"], report["itl_is_by"]) == (6, "token")
    assert report["itl_ms"]["mean"] == pytest.approx((50 + 50 + 100 + 100) / 4)
    assert samples[0].token_ids == ([1, 2, 3, 4, 5, 6] if manners.tell_ids else None)


async def test_cached_tokens_in_the_words_of_llama_cpp() -> None:
    script = Script(SINGLES, cached_tokens=2)
    async with serve_openai(script, OpenAiManners(timings=True)) as url, OpenAiTarget(url) as target:
        samples = await run_closed_loop(target, [REQUEST], concurrency=1)
    assert samples[0].usage is not None
    assert samples[0].usage.cached_tokens == 2


async def test_the_body_asks_for_exactly_so_many_tokens_and_takes_extras() -> None:
    script = Script(SINGLES)
    extra = {"min_tokens": 6, "temperature": 0.5}
    async with (
        serve_openai(script) as url,
        OpenAiTarget(f"{url}/v1/", model="m", extra_body=extra, api_key="secret") as target,
    ):
        await run_closed_loop(target, [REQUEST], concurrency=1)
    path, body = script.seen[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": [7, 8, 9],
        "max_tokens": 6,
        "min_tokens": 6,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert script.headers[0]["authorization"] == "Bearer secret"


async def test_chat_takes_text_and_messages_and_goes_on_with_the_answer() -> None:
    script = Script(SINGLES)
    requests = [
        LoadRequest(3, text="alone"),
        LoadRequest(3, messages=(ChatTurn("user", "hello"),), session="c"),
        LoadRequest(3, messages=(ChatTurn("user", "again"),), session="c"),
    ]
    async with serve_openai(script) as url, OpenAiTarget(url, chat=True, ignore_eos=False) as target:
        samples = await run_closed_loop(target, requests, concurrency=1)
    assert [sample.error for sample in samples] == [None] * 3
    path, body = script.seen[2]
    assert path == "/v1/chat/completions"
    assert "ignore_eos" not in body
    assert [turn["content"] for turn in body["messages"]] == ["hello", "xxx", "again"]
    assert script.seen[0][1]["messages"] == [{"role": "user", "content": "alone"}]
    assert [sample.output_tokens for sample in samples] == [3, 3, 3]


async def test_a_conversation_by_token_ids_wants_a_server_that_tells_ids() -> None:
    requests = multi_turn(1, turns=2, turn_tokens=4, output_tokens=3, vocab_size=500)
    async with serve_openai(Script(SINGLES)) as url, OpenAiTarget(url) as target:
        with pytest.raises(FailedPrecondition, match="return_token_ids"):
            await run_closed_loop(target, requests, concurrency=1)
    script = Script(SINGLES)
    async with serve_openai(script, OpenAiManners(tell_ids=True)) as url, OpenAiTarget(url) as target:
        await run_closed_loop(target, requests, concurrency=1)
    assert script.seen[1][1]["prompt"][4:7] == [1, 2, 3]


@pytest.mark.parametrize(
    ("script", "manners", "error"),
    [
        (Script(), OpenAiManners(status=429), "RESOURCE_EXHAUSTED/HTTP_429"),
        (Script(), OpenAiManners(status=503), "UNAVAILABLE/HTTP_503"),
        (Script(), OpenAiManners(status=418), "INVALID_ARGUMENT/HTTP_418"),
        (Script(SINGLES, cut=True), OpenAiManners(), "UNAVAILABLE/STREAM_CUT"),
        (Script(SINGLES), OpenAiManners(error_in_stream="out of memory"), "INTERNAL/ERROR_IN_STREAM"),
    ],
)
async def test_failures_are_counted_by_their_code(script: Script, manners: OpenAiManners, error: str) -> None:
    async with serve_openai(script, manners) as url, OpenAiTarget(url) as target:
        samples = await run_closed_loop(target, [REQUEST] * 2, concurrency=2)
    report = describe_samples(samples)
    assert report["failed"] == 2
    assert report["errors"][error]["count"] == 2


async def test_a_server_that_is_not_there_is_unavailable_at_its_address() -> None:
    async with serve_openai(Script()) as url:
        pass
    async with OpenAiTarget(url) as target:
        with pytest.raises(MeshError, match=url):
            await target.choose_model()
        samples = await run_closed_loop(target, [REQUEST], concurrency=1)
    assert samples[0].error == "UNAVAILABLE/ConnectError"


async def test_cancelling_the_run_closes_the_connection() -> None:
    script = Script(SINGLES, hang=True)
    async with serve_openai(script) as url, OpenAiTarget(url) as target:
        running = asyncio.create_task(run_closed_loop(target, [REQUEST], concurrency=1))
        await asyncio.wait_for(script.hanging.wait(), timeout=10)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await asyncio.wait_for(script.ended.wait(), timeout=10)


async def test_token_ids_cannot_go_into_a_chat() -> None:
    request = random_tokens(1, prompt_tokens=3, output_tokens=3, vocab_size=9)
    async with serve_openai(Script()) as url, OpenAiTarget(url, chat=True) as target:
        samples = await run_closed_loop(target, request, concurrency=1)
    assert samples[0].error == "INVALID_ARGUMENT"
    assert "--tokenizer" in samples[0].error_message


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://"])
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="--base-url"):
        OpenAiTarget(url)


def test_without_httpx2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(FailedPrecondition, match=r"chipmesh\[bench\]"):
        OpenAiTarget("http://127.0.0.1:1")
