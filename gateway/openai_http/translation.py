"""Bodies to what the mesh takes: `GenerateRequest`s and conversations; and its errors back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.openai_http.bodies import (
    UINT32_MAX,
    ChatBody,
    CompletionBody,
    Message,
    PromptValue,
    SamplingBody,
)
from gateway.openai_http.constraint_sources import asks_for_form
from gateway.openai_http.parsing.calls import read_json
from gateway.prompts import Conversation
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError

COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions where the body has none, as OpenAI documents it."""

# A field of ours -> the body's.
_FIELD_NAMES: Mapping[str, str] = {
    "prompt.chat.messages": "messages",
    "prompt.chat": "messages",
    "prompt.text": "prompt",
    "prompt.tokens.token_ids": "prompt",
    "stop.max_tokens": "max_tokens",
    "stop.min_tokens": "min_tokens",
    "stop.stop_strings": "stop",
    "stop.stop_token_ids": "stop_token_ids",
    "stop.ignore_eos": "ignore_eos",
    "scheduling.priority": "priority",
}
_CONSTRAINT = re.compile(r"\bsampling\.constraint(\.\w+)?")
_SAMPLING = re.compile(r"\bsampling\.(?=[a-z_]+)")
_ROLES = {"developer": "system"}
_TEMPLATE_OWN = frozenset({
    "messages", "tools", "documents", "add_generation_prompt",
    "bos_token", "eos_token", "unk_token", "pad_token",
})  # fmt: skip

_FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def request_of(body: SamplingBody) -> pb.GenerateRequest:
    """All of a request but its prompt and its id. A generation of this interface cannot be resumed.

    Raises:
        InvalidArgument: logit_bias names what is no token id.
    """
    sampling = pb.SamplingOptions(
        top_k=body.top_k,
        # A negative one is the number with the same 64 bits.
        seed=None if body.seed is None else body.seed % 2**64,
        logit_bias=logit_bias_of(body.logit_bias or {}),
        **{name: getattr(body, name) for name in _FLOATS},
    )
    stop = pb.StopOptions(
        max_tokens=max_tokens_of(body),
        stop_strings=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens or 0,
    )
    return pb.GenerateRequest(
        model=body.model,
        sampling=sampling,
        stop=stop,
        logprobs=wants_logprobs(body),
        scheduling=pb.SchedulingOptions(priority=body.priority or 0, resume_window_ms=0),
    )


def wants_logprobs(body: SamplingBody) -> bool:
    """A chat says yes or no, a completion says how many."""
    value = getattr(body, "logprobs", None)
    return value is not None and value is not False


def max_tokens_of(body: SamplingBody) -> int | None:
    """None: all that the context holds."""
    if isinstance(body, ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def prompts_of(body: CompletionBody) -> list[pb.Prompt]:
    """The prompts of a completion."""
    return [_prompt_of(value) for value in body.prompt]


def _prompt_of(value: PromptValue) -> pb.Prompt:
    if isinstance(value, str):
        return pb.Prompt(text=value)
    return pb.Prompt(tokens=pb.TokenPrompt(token_ids=value))


def conversation_of(body: ChatBody, *, size_bytes: int) -> Conversation:
    """The conversation as templates read it: arguments of calls as objects, `developer` as `system`.

    Raises:
        InvalidArgument: content that is no text, or calls whose arguments are no JSON object.
    """
    variables = dict(body.chat_template_kwargs or {})
    own = sorted(_TEMPLATE_OWN & set(variables))
    if own:
        field = f"chat_template_kwargs.{own[0]}"
        raise InvalidArgument(
            f"{field} is what the gateway itself gives to the template; leave it out", field=field
        )
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return Conversation(
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)],
        size_bytes=size_bytes,
        tools=[tool.model_dump(exclude_none=True) for tool in offered_tools(body)],
        variables=variables,
    )


def offered_tools(body: ChatBody) -> list[Any]:
    """The tools that the model may call: none where tool_choice says so."""
    return [] if body.tool_choice == "none" else list(body.tools or ())


def restate(error: MeshError, body: SamplingBody) -> MeshError:
    """An error of the mesh about one of its fields, in the words of the body."""
    if error.field is None or not isinstance(error, (InvalidArgument, FailedPrecondition)):
        return error
    field, message = _restate(error.field, body), _restate(error.message, body)
    return type(error)(message, field=field, reason=error.reason, **error.metadata)


def _restate(text: str, body: SamplingBody) -> str:
    if getattr(body, "max_completion_tokens", None) is not None:
        text = text.replace("stop.max_tokens", "max_completion_tokens")
    text = _CONSTRAINT.sub(asks_for_form(body) or "tools", text)
    for ours, theirs in _FIELD_NAMES.items():
        text = text.replace(ours, theirs)
    return _SAMPLING.sub("", text)


def logit_bias_of(given: Mapping[str, float]) -> dict[int, float]:
    """Values by token id.

    Raises:
        InvalidArgument: a key is no token id.
    """
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= UINT32_MAX):
            field = f"logit_bias[{key[:40]}]"
            raise InvalidArgument(
                f'{field} is no token id; keys are ids as text, such as "50256"', field=field
            )
        bias[int(key)] = value
    return bias


def _message(message: Message, field: str) -> dict[str, Any]:
    turn: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role),
        "content": _text_of(message, field),
    }
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{field}.tool_calls[{index}].function"),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            turn[name] = value
    return turn


def _text_of(message: Message, field: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InvalidArgument(
            f"{field}.content is missing; it is needed unless an assistant called tools",
            field=f"{field}.content",
        )
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            place = f"{field}.content[{index}]"
            raise InvalidArgument(
                f"{place} is of type {part.type[:40]!r}; this mesh takes text only, as "
                '{"type": "text", "text": ...}',
                field=place,
                reason="UNSUPPORTED_VALUE",
            )
    return "".join(part.text or "" for part in content)


def _arguments(text: str, field: str) -> dict[str, Any]:
    """Templates write the arguments themselves, so they read an object, as Hugging Face's convention is."""
    arguments = read_json(text) if text else {}
    if not isinstance(arguments, dict):
        raise InvalidArgument(f"{field}.arguments is no JSON object as text", field=f"{field}.arguments")
    return arguments
