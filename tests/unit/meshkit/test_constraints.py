"""Forms compile or are refused with their cause; a matcher lets pass what has the form, then end tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshkit.constraints.form import GRAMMAR, JSON_SCHEMA, REGEX, Constraint, read_constraint
from meshkit.constraints.matching import ConstraintCompiler, Matcher
from meshkit.errors import FailedPrecondition, InvalidArgument
from tests.unit.gateway.tiny_model import IM_END, VOCAB_SIZE, tokens_of, write_tiny_model


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny")) / "tokenizer.json"


@pytest.fixture(scope="module")
def compiler(tokenizer_file: Path) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=(IM_END, 256))


def allowed(compiler: ConstraintCompiler, matcher: Matcher) -> set[int]:
    words = compiler.new_words(1)[0]
    matcher.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return set(np.flatnonzero(bits).tolist())


def after(compiler: ConstraintCompiler, constraint: Constraint, text: str) -> set[int]:
    matcher = compiler.compile(constraint)
    matcher.consume(tokens_of(text))
    return allowed(compiler, matcher)


def test_every_end_token_is_allowed_exactly_where_the_output_may_end(compiler: ConstraintCompiler) -> None:
    form = Constraint(REGEX, "ab*c?")
    assert after(compiler, form, "") == {ord("a")}
    assert after(compiler, form, "a") == {ord("b"), ord("c"), IM_END, 256}
    assert after(compiler, form, "abbc") == {IM_END, 256}


def test_after_its_end_an_output_is_complete_and_takes_whatever_was_computed_ahead(
    compiler: ConstraintCompiler,
) -> None:
    matcher = compiler.compile(Constraint(REGEX, "ab"))
    matcher.consume([*tokens_of("ab"), IM_END])
    assert matcher.is_complete
    matcher.consume([IM_END, ord("x")])
    assert allowed(compiler, matcher) == {IM_END, 256}


def test_a_copy_goes_its_own_way_and_a_replay_comes_to_the_same_place(compiler: ConstraintCompiler) -> None:
    form = Constraint(
        JSON_SCHEMA, json.dumps({"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 1})
    )
    begun = compiler.compile(form)
    begun.consume(tokens_of('["'))
    one, other = begun.copy(), begun.copy()
    one.consume(tokens_of("ab"))
    other.consume(tokens_of("c"))
    assert allowed(compiler, one) == after(compiler, form, '["ab') == {ord('"')}
    assert allowed(compiler, other) == {ord("d")}
    assert allowed(compiler, begun) == {ord("a"), ord("c")}


def test_gbnf_and_lark_are_told_apart(compiler: ConstraintCompiler) -> None:
    assert after(compiler, Constraint(GRAMMAR, 'root ::= "a" | "b"'), "") == {ord("a"), ord("b")}
    assert after(compiler, Constraint(GRAMMAR, 'start: "a" | "b"'), "") == {ord("a"), ord("b")}


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        (JSON_SCHEMA, "{", "EOF"),
        (JSON_SCHEMA, "[]", "object"),
        (JSON_SCHEMA, '{"type": "fish"}', "fish"),
        (JSON_SCHEMA, '{"not": {}}', "not"),
        (JSON_SCHEMA, '{"$ref": "https://example.com/schema"}', "fetch"),
        (JSON_SCHEMA, '{"enum": []}', "nsatisfiable"),
        (REGEX, "(a", "unclosed"),
        (REGEX, r"(a)\1", "backreferences"),
        (REGEX, "(?=a)", "look-"),
        (GRAMMAR, "start: nothing", "nothing"),
        (GRAMMAR, "root ::= (", "GBNF"),
        (GRAMMAR, "hello", "GBNF"),
        (GRAMMAR, "root ::= " + "(" * 5000, "deep"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_cause(
    compiler: ConstraintCompiler, kind: str, text: str, cause: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        compiler.compile(Constraint(kind, text))
    assert refused.value.field == f"constraint.{kind}"
    assert refused.value.reason == "CONSTRAINT_INVALID"
    assert cause in refused.value.message
    assert len(refused.value.message) < 500


def test_a_token_that_has_not_the_form_and_a_form_that_nothing_has_are_errors(
    compiler: ConstraintCompiler,
) -> None:
    with pytest.raises(InvalidArgument):
        compiler.compile(Constraint(REGEX, "ab")).consume(tokens_of("x"))
    with pytest.raises(InvalidArgument, match="no text"):
        allowed(compiler, compiler.compile(Constraint(REGEX, r"[^\s\S]")))


def test_a_model_without_an_end_token_or_vocabulary_gives_no_forms(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(FailedPrecondition, match="end token"):
        ConstraintCompiler(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=())
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(FailedPrecondition, match="vocabulary"):
        ConstraintCompiler(broken, vocab_size=VOCAB_SIZE, eos_token_ids=(IM_END,))


@pytest.mark.parametrize(
    "constraint", [Constraint(JSON_SCHEMA, "{}"), Constraint(REGEX, "ü"), Constraint(GRAMMAR, "x")]
)
def test_a_form_comes_back_from_its_message(constraint: Constraint) -> None:
    assert read_constraint(constraint.to_proto()) == constraint
