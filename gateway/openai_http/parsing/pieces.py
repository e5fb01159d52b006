"""What output text is made of, and what parsers have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """Text between the marks of a reasoning block."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call that is whole. arguments: a JSON object as text."""

    name: str
    arguments: str


Piece = Reasoning | Content | ToolCall


class CallParser(Protocol):
    """Finds one family's tool calls in text that comes bit by bit."""

    def feed(self, text: str) -> list[Piece]:
        """What became certain with this text."""

    def flush(self) -> list[Piece]:
        """The text ends here: what is left."""


def partial_length(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def content(text: str) -> list[Piece]:
    """A piece of content, or nothing."""
    return [Content(text)] if text else []


class Prose:
    """Text around marked calls. It comes out at once, but for what may be the beginning of the marker, and
    for whitespace, which is dropped beside a call: models write calls on lines of their own.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self._after_call = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that is certain, what follows the marker or None where it did not come)."""
        pending = self._held + text
        if self._after_call:
            pending = pending.lstrip()
            self._after_call = not pending
        start = pending.find(self._marker)
        if start >= 0:
            self._held = ""
            return pending[:start].rstrip(), pending[start + len(self._marker) :]
        cut = len(pending) - partial_length(pending, self._marker)
        cut = len(pending[:cut].rstrip())
        self._held = pending[cut:]
        return pending[:cut], None

    def go_on_after_call(self) -> None:
        """A call has ended: whitespace that follows is dropped."""
        self._after_call = True

    def flush(self) -> str:
        """What was held back and is no marker."""
        held, self._held = self._held, ""
        return held
