"""Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number."""

from __future__ import annotations

from gateway.openai_http.parsing.calls import read_call, read_json
from gateway.openai_http.parsing.pieces import Piece, Prose, content

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls:
    """See `CallParser`. A last call without its closing mark counts where it is whole."""

    def __init__(self) -> None:
        self._prose = Prose(OPEN)
        self._call: str | None = None
        self._searched = 0

    def feed(self, text: str) -> list[Piece]:
        """See `CallParser`."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest is not None:
            if self._call is None:
                certain, rest = self._prose.feed(rest)
                pieces += content(certain)
                if rest is not None:
                    self._call, self._searched = "", 0
            else:
                rest = self._feed_call(self._call + rest, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """See `CallParser`."""
        if self._call is None:
            return content(self._prose.flush())
        body, self._call = self._call, None
        call = read_call(read_json(body))
        return [call] if call is not None else content(OPEN + body)

    def _feed_call(self, body: str, pieces: list[Piece]) -> str | None:
        end = body.find(CLOSE, self._searched)
        if end < 0:
            self._call, self._searched = body, max(0, len(body) - len(CLOSE) + 1)
            return None
        self._call = None
        call = read_call(read_json(body[:end]))
        if call is None:
            pieces += content(OPEN + body[:end] + CLOSE)
        else:
            pieces.append(call)
            self._prose.go_on_after_call()
        return body[end + len(CLOSE) :]
