"""Reasoning blocks: `<think>...</think>` at the beginning of an answer, or begun by the prompt already."""

from __future__ import annotations

import enum

from gateway.openai_http.parsing.pieces import Content, Piece, Reasoning, partial_length

OPEN, CLOSE = "<think>", "</think>"


class _Place(enum.Enum):
    START = enum.auto()
    BLOCK = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Parts the block from the answer. Whitespace at the block's ends and before the answer is dropped.

    begun: the prompt ends inside of a block.
    """

    def __init__(self, *, begun: bool) -> None:
        self._place = _Place.BLOCK if begun else _Place.START
        self._held = ""
        self._strips = True
        """Whether whitespace that comes next is dropped."""

    def feed(self, text: str) -> list[Piece]:
        """What became certain with this text."""
        pieces: list[Piece] = []
        self._held += text
        if self._place is _Place.START:
            self._feed_start()
        if self._place is _Place.BLOCK:
            self._feed_block(pieces)
        if self._place is _Place.ANSWER:
            self._let_out(pieces, len(self._held), Content)
        return pieces

    def flush(self) -> list[Piece]:
        """The text ends here: what is left."""
        held, self._held = self._held, ""
        if self._place is not _Place.BLOCK:
            return [Content(held)] if held and not self._strips else self._blank_start(held)
        text = held.strip() if self._strips else held.rstrip()
        return [Reasoning(text)] if text else []

    def _blank_start(self, held: str) -> list[Piece]:
        """An answer of nothing but whitespace, or of the beginning of a mark, is what it is."""
        return [Content(held)] if held and self._place is _Place.START else []

    def _feed_start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._held, self._place = begun[len(OPEN) :], _Place.BLOCK
        elif begun and partial_length(begun, OPEN) < len(begun):
            self._place, self._strips = _Place.ANSWER, False

    def _feed_block(self, pieces: list[Piece]) -> None:
        end = self._held.find(CLOSE)
        if end >= 0:
            self._let_out(pieces, len(self._held[:end].rstrip()), Reasoning)
            self._held = self._held[self._held.find(CLOSE) + len(CLOSE) :]
            self._place, self._strips = _Place.ANSWER, True
            return
        cut = len(self._held) - partial_length(self._held, CLOSE)
        self._let_out(pieces, len(self._held[:cut].rstrip()), Reasoning)

    def _let_out(self, pieces: list[Piece], count: int, kind: type[Reasoning | Content]) -> None:
        """The first `count` characters held, as a piece of that kind."""
        text, self._held = self._held[:count], self._held[count:]
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        if text:
            pieces.append(kind(text))
