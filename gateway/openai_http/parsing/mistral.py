"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and since 2025
`[TOOL_CALLS]name[ARGS]{...}`.
"""

from __future__ import annotations

import re

from gateway.openai_http.parsing.calls import JsonText, read_call, read_json
from gateway.openai_http.parsing.pieces import Piece, Prose, ToolCall, content

MARK = "[TOOL_CALLS]"
SHOWN_TOKENS = (MARK, "[ARGS]", "[CALL_ID]")
_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
BARE_NAME = re.compile(r"[\w.-]+")
"""What the form of 2025 can name: nothing marks a name's ends in it."""
MAX_NAME_CHARS = 512


class MistralCalls:
    """See `CallParser`."""

    def __init__(self) -> None:
        self._prose = Prose(MARK)
        self._name: str | None = None
        """Text after the mark, before the first bracket; None outside of calls."""
        self._value: JsonText | None = None

    def feed(self, text: str) -> list[Piece]:
        """See `CallParser`."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest is not None:
            if self._value is not None:
                rest = self._feed_value(self._value, rest, pieces)
            elif self._name is not None:
                rest = self._feed_name(self._name + rest, pieces)
            else:
                certain, rest = self._prose.feed(rest)
                pieces += content(certain)
                if rest is not None:
                    self._name = ""
        return pieces

    def flush(self) -> list[Piece]:
        """See `CallParser`."""
        if self._name is None:
            return content(self._prose.flush())
        return content(MARK + self._name + ("" if self._value is None else self._value.text))

    def _feed_name(self, text: str, pieces: list[Piece]) -> str | None:
        begun = text.lstrip()
        start = len(text) - len(begun) if begun.startswith("[") else text.find("{")
        if start >= 0:
            self._name, self._value = text[:start], JsonText()
            return text[start:]
        if len(text) <= MAX_NAME_CHARS:
            self._name = text
            return None
        pieces += content(MARK + text)
        self._name = None
        return ""

    def _feed_value(self, value: JsonText, text: str, pieces: list[Piece]) -> str | None:
        rest = value.feed(text)
        if rest is None:
            return None
        name, self._name, self._value = self._name or "", None, None
        calls = _read_calls(name, value.text)
        if calls:
            pieces += calls
            self._prose.go_on_after_call()
        else:
            pieces += content(MARK + name + value.text)
        return rest


def _read_calls(name: str, text: str) -> list[ToolCall]:
    """The calls in the value after the mark; none where it, or one of them, is malformed."""
    value = read_json(text)
    if isinstance(value, list):
        calls = [read_call(each) for each in value]
    else:
        named = _NAME.fullmatch(name)
        calls = [read_call({"name": named[1], "arguments": value}) if named else None]
    return [call for call in calls if call is not None] if all(calls) else []
