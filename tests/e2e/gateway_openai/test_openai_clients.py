"""OpenAI's own Python client against a mesh of real processes with the real model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from tests.support.golden import Golden, load_golden
from tests.support.mesh import RunningMesh, assert_page_identity, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODEL = "smollm2-135m"
COLOUR = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One cpu worker with the model that scripts/test.sh pulled."""
    with running_mesh(tmp_path_factory.mktemp("mesh"), "--model-path", MODEL, "--dtype", "float32") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def base_url(mesh: RunningMesh) -> str:
    return f"http://{mesh.description['gateway']['openai_address']}/v1"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[Any]:
    """Untyped, since its overloads take no plain dictionaries."""
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def golden() -> list[Golden]:
    return load_golden()


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_greedy_completion_is_the_references_whole_streamed_and_by_token_ids(
    client: Any, golden: list[Golden]
) -> None:
    example = golden[0]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 48, "temperature": 0}
    extra = {"return_token_ids": True}
    whole = client.completions.create(prompt=example.prompt, **asked, extra_body=extra)
    example.check((whole.choices[0].model_extra or {})["token_ids"])
    by_ids = client.completions.create(prompt=example.prompt_token_ids, **asked)
    stream = client.completions.create(prompt=example.prompt, **asked, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in stream)
    assert whole.choices[0].text == by_ids.choices[0].text == streamed
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(example.prompt_token_ids)


def test_a_chat_streams_what_it_answers_whole_and_tells_its_usage(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": COLOUR, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    ends = [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens, "the prompt was seen before"


def test_the_same_seed_draws_the_same_choices_which_differ(client: Any) -> None:
    def draw(seed: int | None, count: int = 2) -> list[str | None]:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=COLOUR,
            max_tokens=16,
            n=count,
            seed=seed,
            temperature=1.0,
        )
        assert [choice.index for choice in reply.choices] == list(range(count))
        return [choice.message.content for choice in reply.choices]

    first = draw(7)
    assert first == draw(7)
    assert first[0] == draw(7, count=1)[0], "a choice is the same whatever the number of others"
    assert first[0] != first[1]
    assert first != draw(8)


def test_logprobs_are_those_of_the_tokens(client: Any) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=COLOUR,
        max_tokens=8,
        temperature=0,
        logprobs=True,
    )
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert len(entries) == 8
    assert all(entry.logprob <= 0 for entry in entries)
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == chat.choices[0].message.content
    text = client.completions.create(
        model=MODEL, prompt="Once upon a", max_tokens=6, temperature=0, logprobs=0
    )
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == text.choices[0].text
    assert (logprobs.text_offset or [])[:2] == [0, len((logprobs.tokens or [""])[0])]


def test_a_stop_string_ends_the_answer_before_it(client: Any, golden: list[Golden]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": golden[0].prompt, "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[12:18]
    cut = client.completions.create(**asked, stop=[stop, "never said"]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_client_that_goes_away_gives_pages_and_slots_back(mesh: RunningMesh, client: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=COLOUR,
        max_tokens=2000,
        n=3,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    assert_page_identity(mesh.wait_until_idle())


def test_errors_are_the_classes_that_the_client_knows(client: Any) -> None:
    for wrong, kind, param in (
        ({"model": "gpt-4o"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"response_format": {"type": "yaml"}}, openai.BadRequestError, "response_format"),
    ):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": MODEL, "messages": COLOUR, **wrong})
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=MODEL, input="a")


def test_32_clients_at_once_are_served_and_counted(mesh: RunningMesh, client: Any) -> None:
    def one(index: int) -> int:
        stream = client.chat.completions.create(
            model=MODEL, messages=COLOUR, max_tokens=1 + index % 9, seed=index, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        (*_, last) = stream
        return int(last.usage.completion_tokens)

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(one, range(32))) == [1 + index % 9 for index in range(32)]
    assert_page_identity(mesh.wait_until_idle())


def test_curl_sees_plain_events_health_and_the_description(base_url: str) -> None:
    with httpx.Client(base_url=base_url.removesuffix("/v1"), trust_env=False, timeout=30) as http:
        body = {"prompt": "Hi", "max_tokens": 2, "stream": True}
        lines = http.post("/v1/completions", json=body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"
        assert http.get("/health").json() == {"status": "ok"}
        assert "chipmesh_num_requests_total" in http.get("/metrics").text
        assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]


def test_a_mesh_with_keys_lets_in_who_has_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.json"
    file = folder / "key.txt"
    file.write_text("cmk_a-key-for-this-test\n", encoding="utf-8")
    keys.write_text(json.dumps([{"name": "team", "file": str(file)}]), encoding="utf-8")
    arguments = (
        "--backend",
        "hash",
        "--model-path",
        MODEL,
        "--load-format",
        "dummy",
        "--api-keys-file",
        str(keys),
    )
    with running_mesh(folder, *arguments) as mesh:
        base_url = f"http://{mesh.description['gateway']['openai_address']}/v1"
        with openai.OpenAI(base_url=base_url, api_key="cmk_a-key-for-this-test", max_retries=0) as good:
            reply = good.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=5)
            assert reply.usage is not None
            assert reply.usage.completion_tokens <= 5
        with (
            openai.OpenAI(base_url=base_url, api_key="cmk_another", max_retries=0) as bad,
            pytest.raises(openai.AuthenticationError),
        ):
            bad.models.list()


CARD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "cats"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def test_every_choice_of_a_json_schema_is_valid_whole_and_streamed(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": COLOUR, "n": 2, "seed": 3, "max_completion_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "card", "schema": CARD}},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == streamed
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    for text in streamed:
        jsonschema.validate(json.loads(text), CARD)


def test_forms_beside_openais_own_and_their_refusals(client: Any) -> None:
    for extra, wanted in (
        ({"guided_regex": "[0-9]{4}"}, r"\d{4}"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
    ):
        answer = client.completions.create(
            model=MODEL, prompt="The", max_tokens=64, logprobs=0, extra_body=extra
        )
        assert re.fullmatch(wanted, answer.choices[0].text)
        assert answer.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model=MODEL, prompt="The", extra_body={"guided_regex": "(a{9999}){9999}{9999}"}
        )
    assert refused.value.param == "guided_regex"
