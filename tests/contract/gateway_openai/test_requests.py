"""What a body becomes: each field reaches the scheduler as the gRPC contract has it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway.fake_scheduler import Submitted
from tests.contract.gateway_openai.openai_mesh import HELLO, MeshFactory, OpenAiMesh, answer, say
from tests.unit.gateway.tiny_model import IM_END, IM_START, tokens_of


async def ask(mesh: OpenAiMesh, path: str, body: dict[str, Any], text: str = "ok") -> tuple[Submitted, Any]:
    """What the scheduler got of a call, and the call's answer."""
    session = await mesh.session()
    async with mesh.http() as http:
        response, submitted = await asyncio.gather(http.post(path, json=body), answer(session, text))
    assert response.status_code == 200, response.text
    return submitted, response.json()


async def test_all_sampling_and_stop_fields_reach_the_scheduler(mesh: OpenAiMesh) -> None:
    body = {
        "model": "tiny", "prompt": "abc", "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3,
        "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 2,
        "seed": 11, "logit_bias": {"5": -100, "7": 1.5}, "stop_token_ids": [9], "min_tokens": 2,
        "priority": -3,
        "user": "someone", "metadata": {"a": "b"}, "logprobs": 0, "best_of": 1, "echo": False,
    }  # fmt: skip
    submitted, _ = await ask(mesh, "/v1/completions", body)
    submit, sampling = submitted.submit, submitted.submit.sampling
    assert list(submit.prompt_token_ids) == tokens_of("abc")
    assert (submit.max_output_tokens, submit.priority) == (7, -3)
    assert set(submit.stop_token_ids) == {9, IM_END}
    assert sampling.temperature == 0.5
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 3, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        -0.5,
        2,
    )
    assert dict(sampling.logit_bias) == {5: -100, 7: 1.5}
    assert (sampling.seed, sampling.min_tokens, sampling.logprobs) == (11, 2, True)


async def test_defaults_are_those_of_openai(run_mesh: MeshFactory) -> None:
    async with run_mesh() as mesh:
        submitted, _ = await ask(mesh, "/v1/completions", {"prompt": "abc"})
        assert submitted.submit.max_output_tokens == 16
        assert submitted.submit.sampling.temperature == 1
        assert not submitted.submit.sampling.logprobs
    async with run_mesh() as mesh:
        submitted, _ = await ask(mesh, "/v1/chat/completions", {"messages": HELLO, "logprobs": False})
        assert submitted.submit.max_output_tokens == 128 - len(submitted.submit.prompt_token_ids)
        assert not submitted.submit.sampling.logprobs


async def test_a_negative_seed_is_the_number_with_its_64_bits(mesh: OpenAiMesh) -> None:
    submitted, _ = await ask(mesh, "/v1/completions", {"prompt": "a", "seed": -1})
    assert submitted.submit.sampling.seed == 2**64 - 1


async def test_max_completion_tokens_goes_before_max_tokens(mesh: OpenAiMesh) -> None:
    body = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 4}
    submitted, _ = await ask(mesh, "/v1/chat/completions", body)
    assert submitted.submit.max_output_tokens == 4


async def test_content_in_parts_and_the_role_developer(mesh: OpenAiMesh) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]
    body = {"messages": [{"role": "developer", "content": "D"}, {"role": "user", "content": parts}]}
    submitted, _ = await ask(mesh, "/v1/chat/completions", body)
    assert list(submitted.submit.prompt_token_ids) == [
        IM_START, *tokens_of("system\nD"), IM_END, *tokens_of("\n"),
        IM_START, *tokens_of("user\nhey"), IM_END, *tokens_of("\n"), IM_START, *tokens_of("assistant\n"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_a_prompt_has_four_forms(mesh: OpenAiMesh, prompt: Any, expected: list[list[int]]) -> None:
    session = await mesh.session()
    async with mesh.http() as http:
        waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": prompt, "n": 2}))
        got = [await session.accepts() for _ in range(2 * len(expected))]
        for index, request in enumerate(got):
            say(request, f"{index}")
        reply = (await waiting).json()
    assert [list(request.submit.prompt_token_ids) for request in got[::2]] == expected
    assert [choice["text"] for choice in reply["choices"]] == [f"{index}" for index in range(len(got))]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_a_stop_string_ends_the_text_before_it(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    for stop in ("STOP", ["no", "STOP"]):
        async with mesh.http() as http:
            body = {"messages": HELLO, "stop": stop, "stream": False}
            reply, request = await asyncio.gather(
                http.post("/v1/chat/completions", json=body), answer(session, "so far STOP and on")
            )
        choice = reply.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("so far ", "stop")
        assert await request.ended_by_gateway() == "stop"


async def test_logprobs_of_a_chat_have_each_token_with_its_bytes(mesh: OpenAiMesh) -> None:
    _, reply = await ask(
        mesh, "/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 0}, "é!"
    )
    first, second, third, last = reply["choices"][0]["logprobs"]["content"]
    assert first == {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": []}
    assert second["bytes"] == [0xA9]
    assert third["token"] == "!"
    assert last["token"] == "<|im_end|>"


async def test_logprobs_of_a_completion_say_where_each_token_begins(mesh: OpenAiMesh) -> None:
    _, reply = await ask(mesh, "/v1/completions", {"prompt": "a", "logprobs": 0}, "é!")
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"],
        "token_logprobs": [-0.5] * 4,
        "text_offset": [0, 0, 1, 2],
        "top_logprobs": None,
    }


async def test_an_impossible_token_has_a_logprob_that_json_can_say(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.http() as http:
        waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "logprobs": 0}))
        say(await session.accepts(), "a", logprob=float("-inf"))
        reply = (await waiting).json()
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_token_ids_are_returned_where_asked_for(mesh: OpenAiMesh) -> None:
    _, reply = await ask(mesh, "/v1/chat/completions", {"messages": HELLO, "return_token_ids": True}, "ab")
    assert reply["choices"][0]["token_ids"] == [97, 98, IM_END]


async def test_a_model_of_token_ids_alone_completes_ids_and_takes_no_text(
    run_mesh: MeshFactory, token_model: Path
) -> None:
    async with run_mesh(model=token_model) as mesh:
        _, reply = await ask(
            mesh, "/v1/completions", {"prompt": [1, 2], "logprobs": 0, "return_token_ids": True}, "a"
        )
        assert reply["choices"][0]["token_ids"] == [97, IM_END]
        assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:97", f"token_id:{IM_END}"]
        async with mesh.http() as http:
            for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
                refused = await http.post(f"/v1/{path}", json=body)
                assert refused.status_code == 400
                assert refused.json()["error"]["code"] == "model_has_no_tokenizer"


async def test_a_clients_request_id_is_in_the_answer_and_with_the_scheduler(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    ids = set()
    async with mesh.http(**{"x-request-id": "page-7"}) as http:
        for _ in range(2):  # The same id twice is no conflict: one page may ask twice.
            reply, submitted = await asyncio.gather(
                http.post("/v1/completions", json={"prompt": "a"}), answer(session, "b")
            )
            assert reply.headers["x-request-id"] == "page-7"
            assert submitted.submit.request_id.startswith("page-7-")
            assert reply.json()["id"] in f"cmpl-{submitted.submit.request_id}"
            ids.add(reply.json()["id"])
    assert len(ids) == 2


async def test_models_are_listed_with_what_they_hold(mesh: OpenAiMesh) -> None:
    await mesh.session()
    async with mesh.client() as client:
        (model,) = (await client.models.list()).data
        assert (model.id, model.object, model.owned_by) == ("tiny", "model", "chipmesh")
        assert model.model_extra == {
            "max_model_len": 128,
            "meta": {"n_vocab": 300},
            "shutdown_date": None,
        } or ((model.model_extra or {})["max_model_len"] == 128)
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_a_large_body_is_read_beside_the_loop_and_served(run_mesh: MeshFactory) -> None:
    async with run_mesh(context_tokens=200_000) as mesh:
        prompt = [index % 250 for index in range(100_000)]
        submitted, reply = await ask(mesh, "/v1/completions", {"prompt": prompt})
        assert list(submitted.submit.prompt_token_ids) == prompt
        assert reply["usage"]["prompt_tokens"] == len(prompt)
        async with mesh.http() as http:
            wrong = await http.post("/v1/completions", json={"prompt": [*prompt, "x"]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
