"""Llama 3.1 to 3.3: the answer is `{"name": ..., "parameters": {...}}`, several parted by `;`, or such after
`<|python_tag|>` anywhere.
"""

from __future__ import annotations

from collections.abc import Collection

from gateway.openai_http.parsing.calls import JsonText, read_call, read_json
from gateway.openai_http.parsing.pieces import Piece, Prose, content

TAG = "<|python_tag|>"
_BETWEEN_CALLS = " \t\r\n;"


class Llama3Calls:
    """See `CallParser`. names: of the tools; a JSON object that names none of them is an answer, not a call.

    It is in one of three places: where a call may begin (the start, after the tag, after a call), inside an
    object, or in prose, where only the tag is looked for.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._prose: Prose | None = None
        self._object: JsonText | None = None
        self._held = ""
        self._before = ""
        """What stood before the object, and comes out with it where that is no call."""
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        """See `CallParser`."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest is not None:
            if self._object is not None:
                rest = self._feed_object(self._object, rest, pieces)
            elif self._prose is not None:
                rest = self._feed_prose(self._prose, rest, pieces)
            else:
                rest = self._feed_start(rest, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """See `CallParser`."""
        if self._object is not None:
            return content(self._before + self._object.text)
        if self._prose is not None:
            return content(self._prose.flush())
        return [] if self._after_call else content(self._before + self._held)

    def _feed_start(self, text: str, pieces: list[Piece]) -> str | None:
        held = self._held + text
        begun = held.lstrip(_BETWEEN_CALLS) if self._after_call else held.lstrip()
        if not begun:
            self._held = held
            return None
        self._held = ""
        if begun.startswith("{"):
            self._before += held[: len(held) - len(begun)]
            self._object = JsonText()
            return begun
        pieces += content(self._before)
        self._before = ""
        self._prose = Prose(TAG)
        return begun if self._after_call else held

    def _feed_prose(self, prose: Prose, text: str, pieces: list[Piece]) -> str | None:
        certain, rest = prose.feed(text)
        pieces += content(certain)
        if rest is not None:
            self._prose, self._before, self._after_call = None, TAG, False
        return rest

    def _feed_object(self, begun: JsonText, text: str, pieces: list[Piece]) -> str | None:
        rest = begun.feed(text)
        if rest is None:
            return None
        self._object = None
        call = read_call(read_json(begun.text))
        if call is None or call.name not in self._names:
            pieces += content(self._before + begun.text)
            self._prose = Prose(TAG)
        else:
            pieces.append(call)
            self._after_call = True
        self._before = ""
        return rest
