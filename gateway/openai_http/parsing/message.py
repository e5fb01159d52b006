"""One answer taken apart for one model: its reasoning, its content and its tool calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.models import ModelText
from gateway.openai_http.parsing.hermes import HermesCalls
from gateway.openai_http.parsing.llama3 import TAG, Llama3Calls
from gateway.openai_http.parsing.mistral import SHOWN_TOKENS, MistralCalls
from gateway.openai_http.parsing.pieces import CallParser, Content, Piece, ToolCall
from gateway.openai_http.parsing.reasoning import CLOSE, OPEN, ReasoningParser
from gateway.text import ChatTemplate


@dataclass(frozen=True)
class ToolFamily:
    """How a family of models writes calls. shown_tokens: special tokens that its marks are made of."""

    name: str
    parser: Callable[[Collection[str]], CallParser]
    shown_tokens: tuple[str, ...] = ()
    call_id_chars: int = 24
    """Of letters and digits; Mistral's templates insist on nine."""


HERMES = ToolFamily("hermes", lambda _: HermesCalls())
LLAMA3 = ToolFamily("llama3", Llama3Calls, (TAG,))
MISTRAL = ToolFamily("mistral", lambda _: MistralCalls(), SHOWN_TOKENS, 9)
_TAIL_TOKENS = 8
FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL)}


def tool_family_of(template: ChatTemplate) -> ToolFamily | None:
    """By the markup that the model's template writes; None where it shows no tools, or in a way not known."""
    if not template.takes_tools:
        return None
    if template.mentions("[TOOL_CALLS]"):
        return MISTRAL
    if template.mentions("<tool_call>"):
        # Qwen3-Coder and GLM write XML between the same marks.
        is_xml = template.mentions("<function=") or template.mentions("<arg_key>")
        return None if is_xml else HERMES
    is_llama = template.mentions("<|start_header_id|>") and template.mentions('"parameters"')
    return LLAMA3 if is_llama or template.mentions(TAG) else None


def reasons(template: ChatTemplate) -> bool:
    """Whether the model writes reasoning blocks: its template knows of their end."""
    return template.mentions(CLOSE)


def begins_reasoning(text: ModelText, prompt_token_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside of a block."""
    tail = text.tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(OPEN)


class MessageParser:
    """Reasoning first, the rest through the tool calls' parser.

    max_calls: further calls are left out; None: all are given.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningParser | None = None,
        calls: CallParser | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._calls_left = max_calls

    def feed(self, text: str) -> list[Piece]:
        """What became certain with this text."""
        if not text:
            return []
        pieces: list[Piece] = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._with_calls(pieces)

    def flush(self) -> list[Piece]:
        """The text ends here: what is left."""
        pieces = self._with_calls([] if self._reasoning is None else self._reasoning.flush())
        return pieces + ([] if self._calls is None else self._allowed(self._calls.flush()))

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return self._allowed(found)

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls_left is None:
            return pieces
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                if not self._calls_left:
                    continue
                self._calls_left -= 1
            kept.append(piece)
        return kept
