"""Calls that a client insists on, by OpenAI's own client, from a model of random weights that knows no tool.

The model runs by operators, not by the step kernel: its sizes fit no program. Nightly: the mesh is its own,
and each push has these grammars' unit tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from tests.support.mesh import running_mesh
from tests.unit.gateway.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(120)]

TEMPLATE = (
    "{% if tools %}{{ tools }} <tool_call>{% endif %}"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "maxProperties": 0}}},
]
ASKED: dict[str, Any] = {
    "model": "model", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 3000,
    "parallel_tool_calls": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    config = folder / "config.json"
    sizes = {"max_position_embeddings": 4096}
    config.write_text(json.dumps({**json.loads(config.read_text()), **sizes}))
    state_dir = tmp_path_factory.mktemp("mesh")
    with running_mesh(state_dir, "--model-path", str(folder), "--load-format", "dummy") as mesh:
        base_url = f"http://{mesh.description['gateway']['openai_address']}/v1"
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
            yield client


def test_a_required_call_comes_with_arguments_of_its_schema(client: Any) -> None:
    called = set()
    for seed in range(6):
        (choice,) = client.chat.completions.create(**ASKED, tool_choice="required", seed=seed).choices
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        jsonschema.validate(json.loads(call.function.arguments), schema[call.function.name])
        called.add(call.function.name)
    assert called == {"weather", "stop"}


def test_a_named_tool_is_the_one_that_is_called_also_streamed_and_with_logprobs(client: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    stream = client.chat.completions.create(**ASKED, tool_choice=named, seed=1, stream=True, logprobs=True)
    calls = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    jsonschema.validate(json.loads("".join(call.function.arguments or "" for call in calls)), WEATHER)
