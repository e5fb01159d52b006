"""What OpenAI's clients read: choices of chats and completions, whole and in chunks, and usage."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.generation_spec import FinishReason
from gateway.live_request import Output, OutputReader
from gateway.models import ServedModel
from gateway.openai_http.choices import end_of
from gateway.openai_http.logprobs import CompletionLogprobs, chat_logprobs
from gateway.openai_http.parsing.message import MessageParser
from gateway.openai_http.parsing.pieces import Content, Piece, Reasoning, ToolCall

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Settings:
    """What the choices of one call have in common. call_id_chars: of a tool call's id."""

    model: ServedModel
    logprobs: bool
    token_ids: bool
    call_id_chars: int = 24


class Choice(Protocol):
    """One choice. Streamed: `opening`, `part` of each output, `closing`. Whole: `take` each output,
    `whole`.
    """

    def opening(self) -> dict[str, Any] | None:
        """What the stream begins with."""

    def part(self, output: Output) -> dict[str, Any] | None:
        """What one output brings; None where nothing of it can be said yet."""

    def closing(self) -> list[dict[str, Any]]:
        """What was held back, and last of all the reason of the end."""

    def take(self, output: Output) -> None:
        """Keep one output."""

    def whole(self) -> dict[str, Any]:
        """All of it."""


class ChatChoice:
    """See `Choice`."""

    def __init__(self, index: int, reader: OutputReader, parser: MessageParser, settings: Settings) -> None:
        self._index = index
        self._reader = reader
        self._parser = parser
        self._settings = settings
        self._call_count = 0
        self._pieces: list[Piece] = []
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> dict[str, Any] | None:
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, output: Output) -> dict[str, Any] | None:
        settings = self._settings
        delta = self._delta(self._parser.feed(output.text))
        if not delta and not settings.logprobs and not settings.token_ids:
            return None
        chunk = self._chunk(delta)
        if settings.logprobs:
            chunk["logprobs"] = {"content": chat_logprobs(output, settings.model), "refusal": None}
        if settings.token_ids:
            chunk["token_ids"] = list(output.token_ids)
        return chunk

    def closing(self) -> list[dict[str, Any]]:
        delta = self._delta(self._parser.flush())
        last = {**self._chunk({}), "finish_reason": self._finish_reason()}
        return [self._chunk(delta), last] if delta else [last]

    def take(self, output: Output) -> None:
        self._pieces += self._parser.feed(output.text)
        if self._settings.logprobs:
            self._logprobs += chat_logprobs(output, self._settings.model)

    def whole(self) -> dict[str, Any]:
        self._pieces += self._parser.flush()
        delta = self._delta(self._pieces)
        calls = delta.get("tool_calls")
        message = {
            "role": "assistant",
            "content": delta.get("content", None if calls else ""),
            "refusal": None,
            **({"reasoning_content": delta["reasoning_content"]} if "reasoning_content" in delta else {}),
            **({"tool_calls": [_without_index(call) for call in calls]} if calls else {}),
        }
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._settings.logprobs else None,
            "finish_reason": self._finish_reason(),
        }
        if self._settings.token_ids:
            choice["token_ids"] = list(self._reader.request.token_ids)
        return choice

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        parts = {"reasoning_content": reasoning, "content": content, "tool_calls": calls}
        return {name: value for name, value in parts.items() if value}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        self._call_count += 1
        chars = self._settings.call_id_chars
        call_id = "".join(secrets.choice(_ALPHABET) for _ in range(chars))
        return {
            "index": self._call_count - 1,
            "id": call_id if chars == 9 else f"call_{call_id}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _finish_reason(self) -> str:
        reason = end_of(self._reader).reason
        return "tool_calls" if self._call_count and reason is FinishReason.STOP else reason.value


class CompletionChoice:
    """See `Choice`."""

    def __init__(self, index: int, reader: OutputReader, settings: Settings) -> None:
        self._index = index
        self._reader = reader
        self._settings = settings
        self._logprobs = CompletionLogprobs(settings.model)
        self._texts: list[str] = []
        self._entries: list[dict[str, Any]] = []

    def opening(self) -> dict[str, Any] | None:
        return None

    def part(self, output: Output) -> dict[str, Any] | None:
        chunk = self._choice(output.text, None)
        if self._settings.logprobs:
            chunk["logprobs"] = self._logprobs.of(output)
        if self._settings.token_ids:
            chunk["token_ids"] = list(output.token_ids)
        return chunk

    def closing(self) -> list[dict[str, Any]]:
        return [self._choice("", end_of(self._reader).reason.value)]

    def take(self, output: Output) -> None:
        self._texts.append(output.text)
        if self._settings.logprobs:
            self._entries.append(self._logprobs.of(output))

    def whole(self) -> dict[str, Any]:
        choice = self._choice("".join(self._texts), end_of(self._reader).reason.value)
        if self._settings.logprobs:
            names = ("tokens", "token_logprobs", "text_offset")
            joined = {name: [value for entry in self._entries for value in entry[name]] for name in names}
            choice["logprobs"] = {**joined, "top_logprobs": None}
        if self._settings.token_ids:
            choice["token_ids"] = list(self._reader.request.token_ids)
        return choice

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": finish_reason}


@dataclass(frozen=True)
class Envelope:
    """What is around the choices. kind: chat.completion, chat.completion.chunk or text_completion."""

    id: str
    kind: str
    model: str
    created: int

    def around(self, choices: Sequence[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """The object that is sent."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **further,
        }


def now() -> int:
    """Seconds since 1970, which `created` is in."""
    return int(time.time())


def usage_of(
    readers: Sequence[OutputReader], *, choices_per_prompt: int, taken: Sequence[int]
) -> dict[str, Any]:
    """Tokens of a call: each prompt counts once, whatever the number of its choices. taken: output tokens of
    each reader.
    """
    prompts = [reader.request for reader in readers[::choices_per_prompt]]
    prompt_tokens = sum(len(request.spec.prompt_token_ids) for request in prompts)
    completion_tokens = sum(taken)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens or 0 for request in prompts)},
    }


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}
