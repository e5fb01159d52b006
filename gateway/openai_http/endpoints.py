"""The two endpoints that generate: a body in, a whole answer or a stream of chunks out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.generation import Generations
from gateway.live_request import OutputReader
from gateway.models import ServedModel
from gateway.openai_http.answers import (
    ChatChoice,
    Choice,
    CompletionChoice,
    Envelope,
    Settings,
    now,
    usage_of,
)
from gateway.openai_http.bodies import ChatBody, CompletionBody, SamplingBody, StreamOptions
from gateway.openai_http.call import Call
from gateway.openai_http.choices import Wanted, first_news, open_choices, read_all
from gateway.openai_http.constraining import Constrain, constrain_chat, constrain_completion
from gateway.openai_http.parsing.message import (
    FAMILIES,
    MessageParser,
    ToolFamily,
    begins_reasoning,
    reasons,
    tool_family_of,
)
from gateway.openai_http.parsing.reasoning import ReasoningParser
from gateway.openai_http.reading import read_body
from gateway.openai_http.refusals import UNSUPPORTED
from gateway.openai_http.scheduling_headers import priority_of, time_left_s
from gateway.openai_http.translation import (
    conversation_of,
    offered_tools,
    prompts_of,
    request_of,
    wants_logprobs,
)
from gateway.prompts import Conversation
from meshkit.errors import InvalidArgument

ROOM_BESIDE_PROMPT = 64 * 1024
"""Bytes of a body for all but its prompt."""
LARGE_BODY_BYTES = 64 * 1024
_DONE = b"data: [DONE]\n\n"

B = TypeVar("B", bound=SamplingBody)
T = TypeVar("T")
MakeChoice = Callable[[int, OutputReader], Choice]


@dataclass
class _Answering:
    """One call whose generations run. taken: tokens of each that went out."""

    call: Call
    body: SamplingBody
    envelope: Envelope
    readers: Sequence[OutputReader]
    choices: Sequence[Choice]
    taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.taken = [0] * len(self.readers)

    def usage(self) -> dict[str, Any]:
        """What the call came to so far."""
        return usage_of(self.readers, choices_per_prompt=self.body.choice_count, taken=self.taken)


class CompletionEndpoints:
    """POST /v1/chat/completions and /v1/completions."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def chat(self, call: Call) -> None:
        """An answer to a conversation."""
        body, size_bytes = await self._read(call, ChatBody)
        model = self._generations.models.find(body.model)
        family = _family_for(body, model)
        settings = _settings(body, model, family)

        def make(index: int, reader: OutputReader) -> Choice:
            return ChatChoice(index, reader, _parser(body, reader, model, family), settings)

        prompt = conversation_of(body, size_bytes=size_bytes)
        constrain = await self._run(partial(constrain_chat, body, model, family), size_bytes=size_bytes)
        await call.while_connected(self._generate(call, body, [prompt], make, family, constrain))

    async def complete(self, call: Call) -> None:
        """Continuations of prompts."""
        body, size_bytes = await self._read(call, CompletionBody)
        settings = _settings(body, self._generations.models.find(body.model), None)

        def make(index: int, reader: OutputReader) -> Choice:
            return CompletionChoice(index, reader, settings)

        prompts = await self._run(partial(prompts_of, body), size_bytes=size_bytes)
        constrain = constrain_completion(body)
        await call.while_connected(self._generate(call, body, prompts, make, None, constrain))

    async def _read(self, call: Call, kind: type[B]) -> tuple[B, int]:
        limit_bytes = self._generations.prompts.max_bytes + ROOM_BESIDE_PROMPT
        content = await call.read(limit_bytes=limit_bytes)
        body = await self._run(partial(read_body, kind, content), size_bytes=len(content))
        call.body = body
        return body, len(content)

    async def _run(self, work: Callable[[], T], *, size_bytes: int) -> T:
        """What `work` returns: for a large body from the pool, as the loop has other streams to serve."""
        return work() if size_bytes <= LARGE_BODY_BYTES else await self._generations.prompts.pool.run(work)

    async def _generate(
        self,
        call: Call,
        body: SamplingBody,
        prompts: Sequence[pb.Prompt | Conversation],
        make_choice: MakeChoice,
        family: ToolFamily | None,
        constrain: Constrain | None,
    ) -> None:
        # The client's id is for logs and may be used twice; a generation's is its own.
        name = f"{call.request_id}-{secrets.token_hex(8)}"
        shown = family.shown_tokens if family is not None else ()
        request = request_of(body)
        request.scheduling.priority = priority_of(call.headers_in, body.priority)
        left_s = time_left_s(call.headers_in)
        wanted = Wanted(request, prompts, body.choice_count, name, call.tenant, shown, constrain, left_s)
        async with AsyncExitStack() as stack:
            readers = await open_choices(stack, self._generations, wanted)
            answering = _Answering(
                call,
                body,
                _envelope(body, name, readers[0].request.spec.model),
                readers,
                [make_choice(index, reader) for index, reader in enumerate(readers)],
            )
            if left_s is not None:
                # Its status can still say that the time was not enough for a place in a batch.
                await first_news(readers)
            await (_stream(answering) if body.stream else _answer_whole(answering))


async def _answer_whole(answering: _Answering) -> None:
    async with aclosing(read_all(answering.readers)) as outputs:
        async for index, output in outputs:
            if output is not None:
                answering.choices[index].take(output)
                answering.taken[index] += len(output.token_ids)
    choices = [choice.whole() for choice in answering.choices]
    await answering.call.answer(200, answering.envelope.around(choices, usage=answering.usage()))


async def _stream(answering: _Answering) -> None:
    call, envelope = answering.call, answering.envelope
    options = answering.body.stream_options or StreamOptions()

    async def send(choice: dict[str, Any] | None) -> None:
        if choice is not None:
            await call.send_event(envelope.around([choice], **_usage_in_chunk(answering, options)))

    await call.begin_events()
    for choice in answering.choices:
        await send(choice.opening())
    async with aclosing(read_all(answering.readers)) as outputs:
        async for index, output in outputs:
            if output is not None:
                answering.taken[index] += len(output.token_ids)
                await send(answering.choices[index].part(output))
            else:
                for last in answering.choices[index].closing():
                    await send(last)
    if options.include_usage:
        await call.send_event(envelope.around([], usage=answering.usage()))
    await call.end_events(_DONE)


def _usage_in_chunk(answering: _Answering, options: StreamOptions) -> dict[str, Any]:
    if options.continuous_usage_stats and options.include_usage:
        return {"usage": answering.usage()}
    return {"usage": None} if options.include_usage else {}


def _envelope(body: SamplingBody, name: str, model: str) -> Envelope:
    if body.is_chat:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        return Envelope(f"chatcmpl-{name}", kind, model, now())
    return Envelope(f"cmpl-{name}", "text_completion", model, now())


def _settings(body: SamplingBody, model: ServedModel, family: ToolFamily | None) -> Settings:
    return Settings(
        model,
        logprobs=wants_logprobs(body),
        token_ids=bool(body.return_token_ids),
        call_id_chars=24 if family is None else family.call_id_chars,
    )


def _family_for(body: ChatBody, model: ServedModel) -> ToolFamily | None:
    """How the model writes calls; None where it is offered no tools.

    Raises:
        InvalidArgument: tools, and a template that would drop them, or writes them in a way that is not
        parsed.
    """
    if not offered_tools(body):
        return None
    template = model.require_text("messages").template
    family = tool_family_of(template)
    if family is None:
        fact = "writes calls in a form not parsed here" if template.takes_tools else "shows the model none"
        raise InvalidArgument(
            f"tools: the chat template of model {model.name!r} {fact} (parsed: {', '.join(FAMILIES)}); send "
            "no tools, or use another model",
            field="tools",
            reason=UNSUPPORTED,
        )
    return family


def _parser(
    body: ChatBody, reader: OutputReader, model: ServedModel, family: ToolFamily | None
) -> MessageParser:
    reasoning = None
    if model.text is not None and reasons(model.text.template):
        prompt = reader.request.spec.prompt_token_ids
        reasoning = ReasoningParser(begun=begins_reasoning(model.text, prompt))
    names = [tool.function.name for tool in offered_tools(body)]
    return MessageParser(
        reasoning=reasoning,
        calls=None if family is None else family.parser(names),
        max_calls=1 if body.parallel_tool_calls is False else None,
    )
