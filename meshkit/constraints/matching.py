"""Compiles a form over a model's vocabulary and follows an output through it, by llguidance.

The gateway's checker and the executor use the same code, so what the one has accepted compiles in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance import gbnf_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # of the stubs alone

from meshkit.constraints.form import GRAMMAR, JSON_SCHEMA, JSON_WHITESPACE, Constraint
from meshkit.errors import FailedPrecondition, InvalidArgument

WordArray = npt.NDArray[np.uint32]

FIELD = "constraint"
INVALID = "CONSTRAINT_INVALID"
TOO_COMPLEX = "CONSTRAINT_TOO_COMPLEX"
MAX_CAUSE_CHARS = 300
_SCHEMA_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}
_LIMITS = llguidance.LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)


class Matcher:
    """One output on its way through its form."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self._inner = inner

    def copy(self) -> Matcher:
        """An independent one at the same place."""
        return Matcher(self._inner.deep_copy())

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing but an end token may follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens. What follows an end token is not looked at.

        Raises:
            InvalidArgument: (CONSTRAINT_TOO_COMPLEX) a limit of the parser was reached, or one of them cannot
                stand there.
        """
        inner = self._inner
        for token_id in token_ids:
            if inner.is_stopped() and not inner.is_error():
                return
            if not inner.consume_token(token_id):
                raise _stuck(inner)

    def fill(self, words: WordArray) -> None:
        """Set the bits of the tokens that may follow, of all others none: [vocab / 32, rounded up].

        Once the output is complete those are the end tokens.

        Raises:
            InvalidArgument: (CONSTRAINT_TOO_COMPLEX) a limit of the parser was reached; (CONSTRAINT_INVALID)
                nothing may follow.
        """
        inner = self._inner
        inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if inner.is_error() or not words.any():
            raise _stuck(inner)


class ConstraintCompiler:
    """Compiles forms for one vocabulary. Safe to use from several threads at once."""

    def __init__(self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Reads the vocabulary (about 0.3 s for 50,000 tokens, with the interpreter's lock).

        Raises:
            FailedPrecondition: the model has no end token, so no output could end; or its tokenizer.json is
                of a kind that llguidance does not read.
        """
        if not eos_token_ids:
            raise FailedPrecondition("the model names no end token, so no output of a form could end")
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_file.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except (ValueError, TypeError, OSError) as error:
            raise FailedPrecondition(
                f"{tokenizer_file} gives no vocabulary to follow a form by: {_cause(str(error))}"
            ) from error
        self.vocab_size = vocab_size

    def __repr__(self) -> str:
        return f"<ConstraintCompiler vocab_size={self.vocab_size}>"

    def compile(self, constraint: Constraint) -> Matcher:
        """The beginning of a form. Takes milliseconds, or for what no gateway has checked any time.

        Raises:
            InvalidArgument: (CONSTRAINT_INVALID) it is malformed or asks for what is not supported.
        """
        grammar = _grammar_of(constraint)
        inner = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if inner.is_error():
            raise _invalid(constraint.kind, inner.get_error())
        return Matcher(inner)

    def new_words(self, rows: int) -> WordArray:
        """Room for the bits of `rows` rows: [rows, vocab / 32, rounded up]."""
        return np.zeros((rows, -(-self.vocab_size // 32)), dtype=np.uint32)


def _grammar_of(constraint: Constraint) -> str:
    """Raises InvalidArgument where the text cannot be read."""
    text = constraint.text
    if constraint.kind == JSON_SCHEMA:
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_SCHEMA_DEFAULTS)
        except ValueError as error:
            raise _invalid(constraint.kind, str(error)) from error
    if constraint.kind == GRAMMAR:
        return llguidance.LLMatcher.grammar_from_lark(_lark_of(text))
    return llguidance.LLMatcher.grammar_from_regex(text)


def _lark_of(text: str) -> str:
    if gbnf_to_lark.is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark.gbnf_to_lark(text)
    except RecursionError as error:
        raise _invalid(GRAMMAR, "it is nested too deeply") from error
    except Exception as error:  # a converter in Python: what it raises for malformed text is of no one class
        raise _invalid(GRAMMAR, f"it is neither Lark (start:) nor GBNF (root ::=): {error}") from error


def _invalid(kind: str, cause: str) -> InvalidArgument:
    return InvalidArgument(
        f"{FIELD}.{kind} cannot be followed: {_cause(cause)}", field=f"{FIELD}.{kind}", reason=INVALID
    )


def _stuck(inner: llguidance.LLMatcher) -> InvalidArgument:
    cause = _cause(inner.get_error())
    if not cause or cause.startswith("NoExtension"):
        return InvalidArgument(f"{FIELD}: no text goes on within the form", field=FIELD, reason=INVALID)
    # What it says of its limits differs from limit to limit; all else is a token that cannot stand there.
    reason = INVALID if "satisfy the grammar" in cause else TOO_COMPLEX
    return InvalidArgument(
        f"{FIELD}: the output cannot go on within the form: {cause}", field=FIELD, reason=reason
    )


def _cause(text: str) -> str:
    """On one line and not too long; llguidance shows the grammar itself over several lines."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_CAUSE_CHARS else f"{line[: MAX_CAUSE_CHARS - 1]}…"
