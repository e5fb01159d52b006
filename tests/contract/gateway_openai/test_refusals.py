"""Errors as OpenAI's clients read them: the right status, the field of the body, no 5xx for a bad one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx2 as httpx
import openai
import pytest

from tests.contract.gateway_openai.openai_mesh import HELLO, MeshFactory, OpenAiMesh, answer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, after its shape was looked at."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = body["error"]
    assert "Traceback" not in error["message"]
    return error


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """A response_format."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# Bodies beside a good message or prompt, and the status, param and code of their refusal.
ASSISTANT = {"role": "assistant", "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}  # fmt: skip
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
NUMBER = {"role": "user", "content": [{"type": "text", "text": 1}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "f", "strict": True}}
MALFORMED = "constraint_invalid"
INVALID, UNSUPPORTED, VOCABULARY = "invalid_value", "unsupported_value", "token_id_out_of_vocabulary"
CHAT_CASES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": []}, 400, "messages", INVALID),
    ({"messages": None}, 400, "messages", INVALID),
    ({"messages": "hi"}, 400, "messages", INVALID),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", INVALID),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", INVALID),
    ({"messages": [{"content": "a"}]}, 400, "messages[0].role", INVALID),
    ({"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages", "chat_role_unknown"),
    ({"messages": [IMAGE]}, 400, "messages[0].content[0]", UNSUPPORTED),
    ({"messages": [NUMBER]}, 400, "messages[0].content[0].text", INVALID),
    ({"messages": [ASSISTANT]}, 400, "messages[0].tool_calls[0].function.arguments", INVALID),
    ({"messages": [{"role": "user", "content": "a" * 200}]}, 400, "messages", "context_length_exceeded"),
    ({"model": "gpt-4o"}, 404, "model", "model_not_found"),
    ({"temperature": -0.1}, 400, "temperature", INVALID),
    ({"temperature": 1e300}, 400, "temperature", INVALID),
    ({"temperature": "1"}, 400, "temperature", INVALID),
    ({"top_p": 0}, 400, "top_p", INVALID),
    ({"n": 0}, 400, "n", INVALID),
    ({"n": 1000}, 400, "n", INVALID),
    ({"seed": 2**64}, 400, "seed", INVALID),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", INVALID),
    ({"max_completion_tokens": 3, "min_tokens": 4}, 400, "min_tokens", INVALID),
    ({"stop": ["x"] * 17}, 400, "stop", INVALID),
    ({"stop": ""}, 400, "stop[0]", INVALID),
    ({"stop_token_ids": [300]}, 400, "stop_token_ids[0]", VOCABULARY),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias[x]", INVALID),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias[1]", INVALID),
    ({"priority": 1001}, 400, "priority", INVALID),
    ({"top_logprobs": 2, "logprobs": True}, 400, "top_logprobs", UNSUPPORTED),
    ({"response_format": {"type": "yaml"}}, 400, "response_format", UNSUPPORTED),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema", INVALID),
    ({"response_format": schema_format({"type": "fish"})}, 400, "response_format", MALFORMED),
    ({"response_format": schema_format({"not": {}})}, 400, "response_format", MALFORMED),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "ignore_eos", INVALID),
    ({"tool_choice": "required"}, 400, "tool_choice", INVALID),
    ({"tool_choice": TOOL}, 400, "tool_choice", INVALID),
    ({"tool_choice": "always"}, 400, "tool_choice", UNSUPPORTED),
    ({"tools": [TOOL]}, 400, "tools", UNSUPPORTED),
    ({"tools": [STRICT]}, 400, "tools", UNSUPPORTED),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type", INVALID),
    ({"functions": [{"name": "f"}]}, 400, "functions", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, 400, "modalities", UNSUPPORTED),
    ({"guided_json": "{"}, 400, "guided_json", INVALID),
    ({"guided_json": {}, "regex": "a"}, 400, "regex", INVALID),
    ({"guided_choice": []}, 400, "guided_choice", INVALID),
    ({"guided_choice": ["a", ""]}, 400, "guided_choice[1]", INVALID),
    ({"guided_regex": "(?=a)"}, 400, "guided_regex", MALFORMED),
    ({"guided_regex": r"[^\s\S]"}, 400, "guided_regex", MALFORMED),
    ({"ebnf": "root ::= ("}, 400, "ebnf", MALFORMED),
    ({"structured_outputs": {"regex": "(a"}}, 400, "structured_outputs", MALFORMED),
    ({"structural_tag": "x"}, 400, "structural_tag", UNSUPPORTED),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template", UNSUPPORTED),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs.messages", INVALID),
]
COMPLETION_CASES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"prompt": None}, 400, "prompt", INVALID),
    ({"prompt": []}, 400, "prompt", INVALID),
    ({"prompt": ""}, 400, "prompt", INVALID),
    ({"prompt": [[]]}, 400, "prompt", INVALID),
    ({"prompt": [1, "a"]}, 400, "prompt", INVALID),
    ({"prompt": [True]}, 400, "prompt", INVALID),
    ({"prompt": [-1]}, 400, "prompt", INVALID),
    ({"prompt": [1, 2**40]}, 400, "prompt", INVALID),
    ({"prompt": [300]}, 400, "prompt[0]", VOCABULARY),
    ({"prompt": ["a"] * 129}, 400, "prompt", INVALID),
    ({"prompt": ["a"] * 10, "n": 20}, 400, "n", INVALID),
    ({"logprobs": 1}, 400, "logprobs", UNSUPPORTED),
    ({"best_of": 2}, 400, "best_of", UNSUPPORTED),
    ({"suffix": "b"}, 400, "suffix", UNSUPPORTED),
    ({"guided_grammar": "start: nothing"}, 400, "guided_grammar", MALFORMED),
    ({"echo": True}, 400, "echo", UNSUPPORTED),
    ({"stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", INVALID),
]
CASES = [(CHAT, {"messages": HELLO}, *case) for case in CHAT_CASES] + [
    (COMPLETION, {"prompt": "a"}, *case) for case in COMPLETION_CASES
]


async def test_each_wrong_field_is_named_with_its_code(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.http() as http:
        for path, good, wrong, status, param, code in CASES:
            body = {**good, **wrong}
            error = error_of(await http.post(path, json=body), status)
            assert (error["param"], error["code"]) == (param, code), (body, error)
            assert error["type"] == "invalid_request_error"
            assert "prompt.chat" not in error["message"]
            assert "sampling." not in error["message"]
    assert not session.has_commands
    assert mesh.gateway.live_count == 0


async def test_a_field_that_is_needed_is_named(mesh: OpenAiMesh) -> None:
    await mesh.session()
    async with mesh.http() as http:
        for path, field in ((CHAT, "messages"), (COMPLETION, "prompt")):
            assert error_of(await http.post(path, json={}), 400)["param"] == field


async def test_bodies_that_are_none(mesh: OpenAiMesh) -> None:
    await mesh.session()
    json_type = {"content-type": "application/json"}
    async with mesh.http() as http:
        for content in (
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"messages": NaN}',
            b'"\\ud800"',
            b"\xff",
            b"[" * 10_000,
        ):
            error = error_of(await http.post(CHAT, content=content, headers=json_type), 400)
            assert error["code"] == "body_not_json"
        form = {"content-type": "text/plain"}
        for headers in (form, {}):
            error = error_of(await http.post(CHAT, content=b"{}", headers=headers), 415)
            assert error["code"] == "content_type_unsupported"


async def test_paths_and_methods_that_there_are_not(mesh: OpenAiMesh) -> None:
    await mesh.session()
    async with mesh.http() as http:
        assert error_of(await http.get("/v1/nothing"), 404)["code"] == "unknown_url"
        assert error_of(await http.post("/v1/responses", json={}), 404)["code"] == "unknown_url"
        assert error_of(await http.get("/v1/models/other"), 404)["code"] == "model_not_found"
        refused = await http.get(CHAT)
        assert error_of(refused, 405)["code"] == "method_not_allowed"
        assert refused.headers["allow"] == "POST"
        # A 4xx, since clients try a 5xx again.
        error = error_of(await http.post("/v1/embeddings", json={"input": "a"}), 400)
        assert error["code"] == "unsupported_endpoint"
        assert "embeddings" in error["message"]


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(run_mesh: MeshFactory) -> None:
    async with run_mesh(max_prompt_bytes=1000) as mesh:
        await mesh.session()
        limit = 1000 + 64 * 1024
        reader, writer = await asyncio.open_connection(*mesh.address.split(":"))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {limit + 1}\r\n\r\n".encode())
        status = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert b" 413 " in status, "nothing of the body was sent"

        async def endless() -> Any:
            for _ in range(100):
                yield b" " * 10_000

        async with mesh.http() as http:
            headers = {"content-type": "application/json"}
            error = error_of(await http.post(CHAT, content=endless(), headers=headers), 413)
            assert error["code"] == "body_too_large"
            assert str(limit) in error["message"]
            long = {"messages": [{"role": "user", "content": "x" * 2000}]}
            error = error_of(await http.post(CHAT, json=long), 400)
            assert error["param"] == "messages"
            assert "1000" in error["message"]


@pytest.mark.parametrize(
    ("code", "reason", "status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", 400, "invalid_request_error"),
        (grpc.StatusCode.FAILED_PRECONDITION, "X", 400, "invalid_request_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, "NO_REPLICA", 503, "server_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504, "server_error"),
        (grpc.StatusCode.INTERNAL, "Y", 500, "server_error"),
    ],
)
async def test_what_the_scheduler_refuses_has_its_status(
    mesh: OpenAiMesh, code: grpc.StatusCode, reason: str, status: int, kind: str
) -> None:
    session = await mesh.session()
    async with mesh.http() as http:
        for stream in (False, True):
            body = {"messages": HELLO, "stream": stream}
            waiting = asyncio.create_task(http.post(CHAT, json=body))
            (await session.submitted()).failed(code, reason, "because of it")
            response = await waiting
            error = error_of(response, status)
            assert (error["type"], error["message"]) == (kind, "because of it")
            assert ("retry-after" in response.headers) is (status in {429, 503})


async def test_without_a_scheduler_it_is_503_with_a_time_to_come_back(run_mesh: MeshFactory) -> None:
    async with run_mesh(scheduler_up=False, accept_timeout_s=0.1) as mesh, mesh.http() as http:
        response = await http.post(CHAT, json={"messages": HELLO, "stream": True})
        error = error_of(response, 503)
        assert (error["code"], response.headers["retry-after"]) == ("scheduler_unavailable", "1")
        health = await http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "unavailable"})


async def test_a_gateway_that_is_full_or_drains_says_so(run_mesh: MeshFactory) -> None:
    async with run_mesh(max_live_requests=2) as mesh, mesh.client() as client:
        session = await mesh.session()
        waiting = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO, n=3))
        for _ in range(2):
            await session.accepts()
        with pytest.raises(openai.RateLimitError) as full:
            await waiting
        assert full.value.code == "too_many_requests"
        assert full.value.response.headers["retry-after"] == "1"
        assert mesh.gateway.live_count == 0, "the choices that had begun have ended"
        stopping = asyncio.create_task(mesh.gateway.stop(5.0))
        await asyncio.sleep(0)
        with pytest.raises(openai.InternalServerError) as draining:
            await client.chat.completions.create(model="tiny", messages=HELLO)
        assert (draining.value.status_code, draining.value.code) == (503, "draining")
        await stopping


async def test_what_the_gateway_itself_does_wrong_is_told_by_an_id_alone(
    mesh: OpenAiMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.session()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("at 10.0.0.7")

    monkeypatch.setattr("gateway.openai_http.endpoints.request_of", broken)
    async with mesh.http() as http:
        error = error_of(await http.post(CHAT, json={"messages": HELLO}), 500)
    assert error["message"].startswith("internal error (id ")
    assert "10.0.0.7" not in json.dumps(error)


async def test_a_request_id_that_cannot_be_one_is_refused(mesh: OpenAiMesh) -> None:
    await mesh.session()
    async with mesh.http(**{"x-request-id": "x" * 200}) as http:
        response = await http.post(CHAT, json={"messages": HELLO})
    assert error_of(response, 400)["param"] == "x-request-id"
    assert len(response.headers["x-request-id"]) == 32


async def test_fields_that_ask_for_nothing_are_no_reason_to_refuse(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    body = {
        "messages": HELLO, "modalities": ["text"], "audio": None, "response_format": {"type": "text"},
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "store": False, "service_tier": "auto",
        "parallel_tool_calls": True, "n": None, "temperature": None, "something_new": {"a": 1},
    }  # fmt: skip
    async with mesh.http() as http:
        response, _ = await asyncio.gather(http.post(CHAT, json=body), answer(session, "ok"))
    assert response.json()["choices"][0]["message"]["content"] == "ok"
