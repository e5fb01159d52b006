"""What chunks and errors of OpenAI-shaped servers mean, and the ways in which these tell token counts."""

from __future__ import annotations

from typing import Any

import orjson

from meshkit.errors import (
    Internal,
    InvalidArgument,
    MeshError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from meshkit.load.targets import Received, ServedModel, Usage

_CLASS_OF_STATUS: dict[int, type[MeshError]] = {
    400: InvalidArgument,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    422: InvalidArgument,
    429: ResourceExhausted,
    500: Internal,
}
MOST_ERROR_CHARACTERS = 300


class ChunkReader:
    """Reads one stream's chunks. finished: a finish_reason came."""

    def __init__(self) -> None:
        self.finished = False
        self._counted = 0

    def read(self, chunk: dict[str, Any]) -> Received | None:
        """What the chunk carries; None for one that only opens the stream.

        Raises:
            MeshError: the chunk is an error.
        """
        if chunk.get("error"):
            raise _error_in_stream(chunk["error"])
        choices = chunk.get("choices") or [{}]
        choice = choices[0]
        ends = choice.get("finish_reason") is not None
        self.finished |= ends
        text, has_tokens = _text_of(choice, ends=ends)
        token_ids = _token_ids_of(choice)
        usage = _usage_of(chunk)
        tokens = self._count(token_ids, usage, has_tokens=has_tokens)
        if tokens == 0 and not text and usage is None:
            return None
        return Received(tokens, () if tokens == 0 else token_ids, text, usage)

    def _count(
        self, token_ids: tuple[int, ...] | None, usage: Usage | None, *, has_tokens: bool
    ) -> int | None:
        """By ids (vLLM's return_token_ids), by running usage (continuous_usage_stats), else unknown."""
        if token_ids is not None:
            return len(token_ids)
        if not has_tokens:
            return 0
        if usage is None:
            return None
        new = usage.completion_tokens - self._counted
        self._counted = usage.completion_tokens
        return new


def _text_of(choice: dict[str, Any], *, ends: bool) -> tuple[str, bool]:
    """(text, whether tokens came). A chat's first chunk has a role and no token; a completion's text may be
    empty although a token came, inside of a character."""
    delta = choice.get("delta")
    if delta is not None:
        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        return text, bool(text)
    text = choice.get("text")
    return text or "", bool(text) or (text is not None and not ends)


def _token_ids_of(choice: dict[str, Any]) -> tuple[int, ...] | None:
    token_ids = choice.get("token_ids")
    return tuple(token_ids) if isinstance(token_ids, list) else None


def _usage_of(chunk: dict[str, Any]) -> Usage | None:
    usage = chunk.get("usage")
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        # llama.cpp tells it beside, in its own words.
        cached = (chunk.get("timings") or {}).get("cache_n")
    return Usage(int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0), cached)


def read_models(body: bytes) -> list[ServedModel]:
    """What GET /v1/models answers.

    Raises:
        Internal: the answer is no list of models.
    """
    try:
        listed = orjson.loads(body)["data"]
        return [ServedModel(str(each["id"]), (each.get("meta") or {}).get("n_vocab")) for each in listed]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise Internal(
            f"the server's list of models is none: {body[:80]!r}; is --base-url an OpenAI interface?",
            reason="BAD_MODELS",
        ) from error


def error_of(status: int, body: bytes) -> MeshError:
    """The error that an HTTP answer is; its reason is HTTP_ and the status."""
    cls = _CLASS_OF_STATUS.get(status, Unavailable if status >= 500 else InvalidArgument)
    return cls(f"HTTP {status}: {_message_of(body)}", reason=f"HTTP_{status}")


def _message_of(body: bytes) -> str:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        content = None
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return str(text or body.decode("utf-8", errors="replace"))[:MOST_ERROR_CHARACTERS]


def _error_in_stream(error: object) -> MeshError:
    text = error.get("message") if isinstance(error, dict) else error
    return Internal(str(text)[:MOST_ERROR_CHARACTERS], reason="ERROR_IN_STREAM")
