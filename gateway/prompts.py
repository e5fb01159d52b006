"""Prompts to token ids: text and conversations go through the bounded pool, never on the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.models import ModelText, ServedModel
from gateway.text import TextPool
from gateway.validation import check_prompt_form, check_size, read_token_prompt
from meshkit.errors import InvalidArgument, ResourceExhausted


@dataclass(frozen=True)
class Conversation:
    """A chat with all that templates know, which is more than `ChatPrompt` carries.

    messages: `role`, `content` (text), and of those that call tools or answer a call what templates read.
    tools: as OpenAI's schema has them. variables: further ones for the template. size_bytes: of all of it.
    """

    messages: Sequence[Mapping[str, Any]]
    size_bytes: int
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


class PromptReader:
    """Turns prompts into tokens.

    max_bytes: largest text or conversation. max_waiting_bytes: of all that wait for the pool or are in it;
    one alone may be larger.
    """

    def __init__(self, pool: TextPool, max_bytes: int, max_waiting_bytes: int = 256 * 1024 * 1024) -> None:
        self.pool = pool
        self.max_bytes = max_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def read(self, prompt: pb.Prompt | Conversation, model: ServedModel) -> Sequence[int]:
        """The token ids of `prompt`; may be empty where a text holds nothing that the model has tokens for.

        Raises:
            InvalidArgument: the prompt's field at fault, with what is allowed.
            FailedPrecondition: text or chat for a model of token ids alone.
            ResourceExhausted: too many texts wait for the pool.
        """
        if isinstance(prompt, Conversation):
            check_size(prompt.size_bytes, field="prompt.chat", max_bytes=self.max_bytes)
        else:
            check_prompt_form(prompt, max_bytes=self.max_bytes)
            if prompt.WhichOneof("form") == "tokens":
                return read_token_prompt(prompt.tokens.token_ids, model)
        text = model.require_text(field_of(prompt))
        size_bytes = prompt.size_bytes if isinstance(prompt, Conversation) else prompt.ByteSize()
        self._check_room(size_bytes)
        self._waiting_bytes += size_bytes
        try:
            if isinstance(prompt, pb.Prompt) and prompt.WhichOneof("form") == "text":
                return await self.pool.run(_encode, prompt.text, text, text.add_special_tokens)
            return await self.pool.run(_encode_chat, prompt, text)
        except InvalidArgument as error:
            raise _at_prompt(error) from error
        finally:
            self._waiting_bytes -= size_bytes

    def _check_room(self, size_bytes: int) -> None:
        if self._waiting_bytes and self._waiting_bytes + size_bytes > self._max_waiting_bytes:
            wait_s = self.pool.retry_after_s()
            raise ResourceExhausted(
                f"texts of {self._waiting_bytes} bytes are being processed or wait already, the limit is "
                f"{self._max_waiting_bytes} (max_waiting_text_bytes); try again in {wait_s:.3g} s",
                reason="TEXT_POOL_FULL",
                retry_after_s=wait_s,
            )


def field_of(prompt: pb.Prompt | Conversation) -> str:
    """The path of the field that holds the prompt's content."""
    form = "chat" if isinstance(prompt, Conversation) else prompt.WhichOneof("form")
    return {"text": "prompt.text", "chat": "prompt.chat", "tokens": "prompt.tokens.token_ids"}.get(
        form or "", "prompt"
    )


def as_repeated(token_ids: Sequence[int]) -> Sequence[int]:
    """`token_ids` as a repeated field: four bytes each, and copied into the next message without a loop.

    A live request keeps its prompt for replay, and a long one would hold the event loop for 10 ms each time.
    """
    return pb.TokenPrompt(token_ids=token_ids).token_ids


def _encode(text: str, model_text: ModelText, add_special_tokens: bool) -> Sequence[int]:
    token_ids = model_text.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return as_repeated(token_ids)


def _conversation_of(prompt: pb.Prompt | Conversation) -> Conversation:
    if isinstance(prompt, Conversation):
        return prompt
    messages = [{"role": message.role, "content": message.content} for message in prompt.chat.messages]
    return Conversation(messages, prompt.ByteSize())


def _encode_chat(prompt: pb.Prompt | Conversation, model_text: ModelText) -> Sequence[int]:
    chat = _conversation_of(prompt)
    rendered = model_text.template.render(chat.messages, tools=chat.tools, variables=chat.variables)
    # The template has written the special tokens already.
    return _encode(rendered, model_text, False)


def _at_prompt(error: InvalidArgument) -> InvalidArgument:
    """The text package knows its own fields; a client knows them below `prompt`."""
    if error.field is None or error.field.startswith("prompt"):
        return error
    return InvalidArgument(
        f"prompt.{error.message}", field=f"prompt.{error.field}", reason=error.reason, **error.metadata
    )
