"""Where a body asks for a form of its content: OpenAI's `response_format`, and what vLLM and SGLang add."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.openai_http.bodies import ChatBody, ResponseFormat, SamplingBody
from gateway.validation import choice_constraint
from meshkit.constraints.form import GRAMMAR, JSON_SCHEMA, JSON_WHITESPACE, REGEX, Constraint
from meshkit.errors import InvalidArgument

UNSUPPORTED = "UNSUPPORTED_VALUE"
ANY_OBJECT = '{"type":"object"}'
RESPONSE_FORMAT = "response_format"


@dataclass(frozen=True)
class ContentForm:
    """A form of an answer's content. field: of the body, for errors. lark: the same as a part of a grammar;
    "" for a grammar, which is a whole.
    """

    constraint: Constraint
    field: str
    lark: str


def content_form(body: SamplingBody) -> ContentForm | None:
    """What the body asks for; None where any content will do.

    Raises:
        InvalidArgument: it asks twice, or for what there is not; the field is named.
    """
    forms = list(_forms(body))
    if len(forms) > 1:
        raise InvalidArgument(
            f"{forms[1].field} is set, and so is {forms[0].field}; an output has one form: leave one of them "
            "out",
            field=forms[1].field,
        )
    return forms[0] if forms else None


def asks_for_form(body: SamplingBody) -> str | None:
    """The field that asks for a form of the content, for errors about it."""
    if (
        isinstance(body, ChatBody)
        and body.response_format is not None
        and body.response_format.type != "text"
    ):
        return RESPONSE_FORMAT
    names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    return next(
        (name for name in (*names, "json_schema", "regex", "ebnf") if getattr(body, name) is not None), None
    )


def schema_lark(schema: str) -> str:
    """A JSON schema, which is an object, as a part of a grammar, with the blanks that whole ones allow."""
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return "%json " + dump_schema({**options, **orjson.loads(schema)}, field="schema")


def dump_schema(schema: Any, *, field: str) -> str:
    """A JSON schema as text.

    Raises:
        InvalidArgument: it is no object, or nested too deeply to be written.
    """
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except ValueError as error:
            raise InvalidArgument(f"{field} is no JSON: {error}", field=field) from error
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{field} is no JSON schema, which is an object", field=field)
    try:
        return orjson.dumps(schema).decode()
    except TypeError as error:
        raise InvalidArgument(f"{field} cannot be read: {error}", field=field) from error


def _forms(body: SamplingBody) -> Iterator[ContentForm]:
    if isinstance(body, ChatBody) and body.response_format is not None:
        yield from _of_response_format(body.response_format)
    for field, value in (("guided_json", body.guided_json), ("json_schema", body.json_schema)):
        if value is not None:
            yield _of_schema(value, field)
    for field, regex in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if regex is not None:
            yield _of_regex(regex, field)
    for field, grammar in (("guided_grammar", body.guided_grammar), ("ebnf", body.ebnf)):
        if grammar is not None:
            yield ContentForm(Constraint(GRAMMAR, grammar), field, "")
    if body.guided_choice is not None:
        yield _of_choice(body.guided_choice, "guided_choice")
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs.model_dump(exclude_none=True))


def _of_response_format(given: ResponseFormat) -> Iterator[ContentForm]:
    if given.type == "json_object":
        yield _of_schema(ANY_OBJECT, RESPONSE_FORMAT)
    elif given.type == "json_schema":
        field = f"{RESPONSE_FORMAT}.json_schema"
        if given.json_schema is None or given.json_schema.schema_ is None:
            raise InvalidArgument(
                f"{field}.schema is missing; give one, or use type json_object", field=f"{field}.schema"
            )
        yield _of_schema(given.json_schema.schema_, f"{field}.schema")
    elif given.type != "text":
        raise InvalidArgument(
            f"{RESPONSE_FORMAT} is {given.type[:80]!r}; text, json_object and json_schema are supported",
            field=RESPONSE_FORMAT,
            reason=UNSUPPORTED,
        )


def _of_structured_outputs(given: dict[str, Any]) -> Iterator[ContentForm]:
    """As vLLM has them, less what is no form (backends, white space)."""
    if given.get("json_object"):
        yield _of_schema(ANY_OBJECT, "structured_outputs.json_object")
    if "json_value" in given:
        yield _of_schema(given["json_value"], "structured_outputs.json")
    if "regex" in given:
        yield _of_regex(given["regex"], "structured_outputs.regex")
    if "choice" in given:
        yield _of_choice(given["choice"], "structured_outputs.choice")
    if "grammar" in given:
        yield ContentForm(Constraint(GRAMMAR, given["grammar"]), "structured_outputs.grammar", "")


def _of_schema(schema: Any, field: str) -> ContentForm:
    text = dump_schema(schema, field=field)
    return ContentForm(Constraint(JSON_SCHEMA, text), field, schema_lark(text))


def _of_regex(regex: str, field: str) -> ContentForm:
    return ContentForm(Constraint(REGEX, regex), field, f"/{_between_slashes(regex)}/")


def _of_choice(texts: list[str], field: str) -> ContentForm:
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return ContentForm(choice_constraint(texts, field=field), field, f"({alternatives})")


def _between_slashes(regex: str) -> str:
    """Slashes and line ends escaped, those that are escaped already left."""
    written: list[str] = []
    escaped = False
    for character in regex:
        escape = character in "/\n" and not escaped
        written.append({"/": r"\/", "\n": r"\n"}[character] if escape else character)
        escaped = character == "\\" and not escaped
    return "".join(written)
