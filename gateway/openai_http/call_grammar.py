"""Tool calls as grammars, in the forms that the parsers of `parsing` read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from gateway.openai_http.bodies import FunctionTool
from gateway.openai_http.constraint_sources import dump_schema, schema_lark
from gateway.openai_http.parsing import hermes, mistral
from gateway.openai_http.parsing.message import HERMES, LLAMA3, MISTRAL, ToolFamily
from meshkit.errors import InvalidArgument

MAX_CALLS = 32
"""Of one answer: a small model would else call on to the end."""
ANYTHING = "/(?s:.*)/"

Mark = Callable[[str], str]
"""A mark as a part of a grammar: its token where it is one of the special ones, else its text."""


def call_grammar(
    family: ToolFamily, tools: Sequence[FunctionTool], mark: Mark, *, several: bool, named_args: bool
) -> str:
    """The calls of some tools, each with arguments of its schema: Lark, with the rules `calls` (one call or
    more) and `answer` (calls, text, or both).

    several: more than one call may come. named_args: Mistral's form of 2025, `name[ARGS]{...}`.

    Raises:
        InvalidArgument: parameters are no schema; the field is named.
    """
    if family.name == HERMES.name:
        rules = _hermes(mark, several=several)
    elif family.name == LLAMA3.name:
        rules = _llama3(several=several)
    elif family.name == MISTRAL.name:
        rules = _mistral(mark, several=several, named_args=named_args)
    else:
        raise ValueError(f"family {family.name!r} has no grammar of its calls")
    key = "parameters" if family.name == LLAMA3.name else "arguments"
    bare = family.name == MISTRAL.name and named_args
    objects = [_object(index, tool, key, mark, bare=bare) for index, tool in enumerate(tools)]
    choice = "object: " + " | ".join(f"object_{index}" for index in range(len(tools)))
    return "\n".join((rules, choice, *objects)) + "\n"


def _object(index: int, tool: FunctionTool, key: str, mark: Mark, *, bare: bool) -> str:
    field = f"tools[{index}].function.parameters"
    arguments = schema_lark(dump_schema({"type": "object", **(tool.parameters or {})}, field=field))
    if bare:
        if not mistral.BARE_NAME.fullmatch(tool.name):
            raise InvalidArgument(
                f"tools[{index}].function.name is {tool.name[:80]!r}; this model writes names of letters, "
                "digits, _, - and . only",
                field=f"tools[{index}].function.name",
            )
        return f"object_{index}: {_text(tool.name)} {mark('[ARGS]')} {arguments}"
    opening = _text(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')
    return f'object_{index}: {opening} {arguments} "}}"'


def _more(part: str, *, several: bool) -> str:
    """What may follow the first of several."""
    return f"({part}){{0,{MAX_CALLS - 1}}}" if several else ""


def _hermes(mark: Mark, *, several: bool) -> str:
    opening, closing = mark(hermes.OPEN), mark(hermes.CLOSE)
    call = rf'"\n" object "\n" {closing}'
    return "\n".join((
        "calls: call " + _more(r'"\n" call', several=several),
        f"call: {opening} {call}",
        f"answer: said_call{'*' if several else '?'} rest",
        f"said_call: lead {call}",
        _until("lead", opening),
        f"rest: {ANYTHING}",
    ))  # fmt: skip


def _llama3(*, several: bool) -> str:
    # What begins otherwise is text: the parser looks for calls at the beginning only.
    return "\n".join((
        "calls: object " + _more('"; " object', several=several),
        "answer: calls | rest",
        r"rest: /\s{0,8}([^{\s](?s:.*))?/",
    ))  # fmt: skip


def _mistral(mark: Mark, *, several: bool, named_args: bool) -> str:
    opening = mark(mistral.MARK)
    if named_args:
        after = "object " + _more(f"{opening} object", several=several)
    else:
        after = '" "? "[" object ' + _more('", " object', several=several) + ' "]"'
    return "\n".join((
        f"calls: {opening} {after}",
        "answer: said_calls | rest",
        f"said_calls: lead {after}",
        _until("lead", opening),
        f"rest: {ANYTHING}",
    ))  # fmt: skip


def _until(name: str, mark: str) -> str:
    """Any text up to the first such mark. A special token is no text, so text cannot hold it."""
    return f"{name}: {ANYTHING} {mark}" if mark.startswith("<[") else f"{name}[lazy]: {ANYTHING} {mark}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
