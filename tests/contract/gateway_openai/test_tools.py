"""Tools go into the template, calls come out of the text, reasoning is parted from the answer."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageToolCall

from tests.contract.gateway_openai.openai_mesh import MeshFactory, answer
from tests.unit.gateway.tiny_model import CHAT_TEMPLATE

TOOLS_SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS_SHOWN = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }}={{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if message.role == 'tool' %}({{ message.tool_call_id }}){% endif %}{% endfor %}"
)
HERMES = CHAT_TEMPLATE + TOOLS_SHOWN + CALLS_SHOWN + "{# <tool_call> #}"
MISTRAL = CHAT_TEMPLATE + TOOLS_SHOWN + "{# [TOOL_CALLS] #}"
LLAMA3 = CHAT_TEMPLATE + TOOLS_SHOWN + "{# <|python_tag|> #}"
THINKING = CHAT_TEMPLATE + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
BEGUN = CHAT_TEMPLATE + "<think>\n{# </think> #}"

USER = {"role": "user", "content": "weather?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": [TOOL]}
CALL = '{"name": "get_weather", "arguments": {"city": "Kyiv"}}'


def text_of(token_ids: Any) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


@pytest.mark.parametrize(
    ("template", "text", "id_form"),
    [
        (HERMES, f"Look.\n<tool_call>\n{CALL}\n</tool_call>", r"call_\w{24}"),
        (LLAMA3, CALL.replace("arguments", "parameters"), r"call_\w{24}"),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]", r"[A-Za-z0-9]{9}"),
    ],
    ids=["hermes", "llama3", "mistral"],
)
async def test_a_call_is_the_answer_whole_and_streamed(
    run_mesh: MeshFactory, template: str, text: str, id_form: str
) -> None:
    async with run_mesh(template=template) as mesh, mesh.client() as client:
        session = await mesh.session()
        whole, request = await asyncio.gather(client.chat.completions.create(**ASKED), answer(session, text))
        assert json.dumps(TOOL) in text_of(request.submit.prompt_token_ids)
        choice = whole.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert isinstance(call, ChatCompletionMessageToolCall)
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Kyiv"})
        assert re.fullmatch(id_form, call.id)
        assert choice.message.content == ("Look." if "Look" in text else None)

        async def streamed() -> list[Any]:
            return [chunk async for chunk in await client.chat.completions.create(**ASKED, stream=True)]

        chunks, _ = await asyncio.gather(streamed(), answer(session, text))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert [(call.index, call.function.name) for call in calls] == [(0, "get_weather")]
        assert json.loads(calls[0].function.arguments) == {"city": "Kyiv"}
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
            "tool_calls"
        ]
        assert "tool_call" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def test_answers_of_tools_and_earlier_calls_reach_the_template(run_mesh: MeshFactory) -> None:
    made = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Kyiv"}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    async with run_mesh(template=HERMES) as mesh, mesh.client() as client:
        session = await mesh.session()
        reply, request = await asyncio.gather(
            client.chat.completions.create(**{**ASKED, "messages": messages}), answer(session, "Sunny.")
        )
    prompt = text_of(request.submit.prompt_token_ids)
    assert '[get_weather={"city": "Kyiv"}](c1)' in prompt
    assert "tool\nsunny" in prompt
    assert reply.choices[0].message.content == "Sunny."
    assert reply.choices[0].finish_reason == "stop"


async def test_tool_choice_none_shows_no_tools_and_parses_no_calls(run_mesh: MeshFactory) -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    async with run_mesh(template=HERMES) as mesh, mesh.client() as client:
        session = await mesh.session()
        reply, request = await asyncio.gather(
            client.chat.completions.create(**ASKED, tool_choice="none"), answer(session, text)
        )
    assert "get_weather" not in text_of(request.submit.prompt_token_ids)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (text, "stop")


async def test_one_call_at_most_where_parallel_ones_are_not_wanted(run_mesh: MeshFactory) -> None:
    async with run_mesh(template=HERMES) as mesh, mesh.client() as client:
        session = await mesh.session()
        reply, _ = await asyncio.gather(
            client.chat.completions.create(**ASKED, parallel_tool_calls=False),
            answer(session, f"<tool_call>{CALL}</tool_call>" * 2),
        )
    assert len(reply.choices[0].message.tool_calls or ()) == 1


async def test_reasoning_is_parted_from_the_answer_whole_and_streamed(run_mesh: MeshFactory) -> None:
    async with run_mesh(template=THINKING) as mesh, mesh.client() as client:
        session = await mesh.session()
        create, asked = client.chat.completions.create, {"model": "tiny", "messages": [USER]}
        text = "<think>\nHm.\n</think>\n\nSunny."
        whole, _ = await asyncio.gather(create(**asked), answer(session, text))
        message = whole.choices[0].message
        assert (message.content, message.model_extra) == ("Sunny.", {"reasoning_content": "Hm."})

        async def streamed() -> list[Any]:
            return [chunk.choices[0].delta async for chunk in await create(**asked, stream=True)]

        deltas, _ = await asyncio.gather(streamed(), answer(session, text))
        assert "".join(delta.content or "" for delta in deltas) == "Sunny."
        assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "Hm."
        # A variable of the model's own template.
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        plain, request = await asyncio.gather(create(**asked, extra_body=off), answer(session, "Sunny."))
        assert text_of(request.submit.prompt_token_ids).endswith("</think>\n\n")
        assert plain.choices[0].message.content == "Sunny."


async def test_a_block_that_the_prompt_has_begun_is_reasoning(run_mesh: MeshFactory) -> None:
    async with run_mesh(template=BEGUN) as mesh, mesh.client() as client:
        session = await mesh.session()
        reply, _ = await asyncio.gather(
            client.chat.completions.create(model="tiny", messages=[USER]),
            answer(session, "Hm.</think>Sunny."),
        )
    message = reply.choices[0].message
    assert (message.content, message.model_extra) == ("Sunny.", {"reasoning_content": "Hm."})
