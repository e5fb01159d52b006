"""Bodies that no client would send: the answer is a good one, or a refusal in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.openai_http.bodies import ChatBody, CompletionBody
from gateway.openai_http.refusals import REFUSED_FIELDS
from tests.contract.gateway.fake_scheduler import FakeSession, Submitted
from tests.contract.gateway_openai.openai_mesh import MeshFactory, OpenAiMesh, say

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False,
    allow_infinity=False), st.text(max_size=20), st.sampled_from([0, 1, -1, 2**31, 2**32, 0.5, "", "auto",
    "none", "tiny", "text", "user"]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={"text": TEXT})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])},
    optional={"content": TEXT | st.lists(PART, max_size=3) | ANYTHING, "tool_calls": ANYTHING, "name": TEXT},
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "", "other"]),
    "stream": st.booleans(),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(-1, 9),
    "temperature": st.floats(0, 3),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "logprobs": st.booleans() | st.integers(0, 2),
    "logit_bias": st.dictionaries(st.integers(-2, 400).map(str), st.floats(-101, 101), max_size=3),
    "seed": st.integers(-(2**64), 2**65),
    "stream_options": ANYTHING,
    "tools": ANYTHING,
    "response_format": ANYTHING | st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "guided_regex": TEXT,
    "chat_template_kwargs": st.dictionaries(TEXT, ANYTHING, max_size=2),
}
NAMES = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *REFUSED_FIELDS})


def bodies(**required: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Good values for some fields, anything for others."""
    plausible = st.fixed_dictionaries(required, optional=FIELDS)
    wild = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3)
    return st.builds(lambda one, other: {**one, **other}, plausible, wild | st.just({}))


PROMPT = TEXT | st.lists(st.integers(-1, 310), max_size=5) | st.lists(TEXT, max_size=3) | ANYTHING
GOOD_MESSAGES = st.just([{"role": "user", "content": "hi"}])
GOOD_CHATS = st.fixed_dictionaries(
    {"messages": GOOD_MESSAGES},
    optional={
        **{name: FIELDS[name] for name in ("n", "temperature", "guided_regex")},
        "max_tokens": st.integers(1, 9),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    },
)
CHATS = GOOD_CHATS | bodies(messages=st.lists(MESSAGE, max_size=3))
COMPLETIONS = bodies(prompt=PROMPT)


@pytest.fixture
async def served(run_mesh: MeshFactory) -> AsyncIterator[OpenAiMesh]:
    """A mesh whose scheduler answers everything."""
    async with run_mesh() as mesh, _answering(await mesh.session()):
        yield mesh


@asynccontextmanager
async def _answering(session: FakeSession) -> AsyncIterator[None]:
    async def answer_all() -> None:
        while True:
            try:
                command = await session.next_command()
            except asyncio.TimeoutError:
                continue
            if command.WhichOneof("command") == "submit":
                submitted = Submitted(session, command.request_number, command.submit)
                submitted.queued()
                submitted.placed()
                say(submitted, "ok"[: max(0, command.submit.max_output_tokens - 1)])

    task = asyncio.create_task(answer_all())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check(response: httpx.Response, body: object) -> None:
    if response.status_code == 200:
        assert response.content
        return
    assert 400 <= response.status_code < 500, (response.status_code, response.text, body)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"]
    assert error["code"] != "internal", (error, body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_no_body_makes_the_gateway_fail(served: OpenAiMesh, path: str) -> None:
    statuses: set[int] = set()

    @settings(suppress_health_check=list(HealthCheck))
    @given(CHATS if path.startswith("/v1/chat") else COMPLETIONS)
    def examples(body: dict[str, Any]) -> None:
        drawn.append(body)

    drawn: list[dict[str, Any]] = []
    examples()
    async with served.http() as http:
        for body in drawn:
            content = _dumps(body)
            response = await http.post(path, content=content, headers={"content-type": "application/json"})
            check(response, body)
            statuses.add(response.status_code)
    assert {200, 400} <= statuses, f"the bodies show too little: {statuses}"
    assert served.gateway.live_count == 0


def _dumps(body: object) -> bytes:
    """JSON that a client in another language may send: numbers of any size."""
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()
