"""What bodies ask for as grammars: outputs that are drawn by them are what the parsers read as calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from tokenizers import Tokenizer

from gateway.config import ServedModelConfig
from gateway.models import ServedModel, open_served_model
from gateway.openai_http.bodies import ChatBody, CompletionBody
from gateway.openai_http.constraining import Constrain, constrain_chat, constrain_completion
from gateway.openai_http.parsing.message import FAMILIES, MessageParser, tool_family_of
from gateway.openai_http.parsing.pieces import Content, Piece, Reasoning, ToolCall
from gateway.openai_http.parsing.reasoning import ReasoningParser
from meshkit.constraints.form import Constraint
from meshkit.constraints.matching import ConstraintCompiler
from meshkit.errors import InvalidArgument
from tests.unit.gateway.tiny_model import VOCAB_SIZE, tokens_of, write_tiny_model

TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>",
    "llama3": '{{ tools }}<|start_header_id|>"parameters"',
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "mistral, names before arguments": "{{ tools }}[TOOL_CALLS][ARGS]",
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/count"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 3}},
}
PING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": 'get "weather"', "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "ping", "parameters": PING, "strict": True}},
]
BARE_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    TOOLS[1],
]
SCHEMAS = {'get "weather"': WEATHER, "get_weather": WEATHER, "ping": PING}
JSON_ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}


def model_of(folder: Path, template: str) -> ServedModel:
    write_tiny_model(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return open_served_model(ServedModelConfig(name="tiny", path=str(folder)), cache_dir=folder)


def tools_for(model: ServedModel) -> list[dict[str, Any]]:
    """One of them has a name that is to be escaped, where the model can write such."""
    assert model.text is not None
    return BARE_TOOLS if model.text.template.mentions("[ARGS]") else TOOLS


def body_of(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def constrain(body: ChatBody, model: ServedModel) -> Constrain:
    family = tool_family_of(model.text.template) if model.text is not None and body.tools else None
    made = constrain_chat(body, model, family)
    assert made is not None
    return made


class Writer:
    """Draws texts that have a form, or follows one."""

    def __init__(self, model: ServedModel) -> None:
        assert model.text is not None
        self._end = model.eos_token_ids[0]
        self._compiler = ConstraintCompiler(
            model.text.tokenizer.file, vocab_size=VOCAB_SIZE, eos_token_ids=model.eos_token_ids
        )

    def draw(self, constraint: Constraint, *, seed: int, most: int = 400) -> str:
        """A whole text; it ends where it may, so texts of any length end soon."""
        matcher, choose, text = self._compiler.compile(constraint), random.Random(seed), bytearray()
        words = self._compiler.new_words(1)[0]
        while len(text) < most:
            matcher.fill(words)
            tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            token = self._end if self._end in tokens and choose.random() < 0.5 else choose.choice(tokens)
            if token == self._end:
                return text.decode()
            text.append(token)
            matcher.consume((token,))
        raise AssertionError(f"no end: {text.decode(errors='replace')}")

    def takes(self, constraint: Constraint, text: str) -> bool:
        """Whether it is a whole text of the form."""
        matcher = self._compiler.compile(constraint)
        try:
            matcher.consume((*tokens_of(text), self._end))
        except InvalidArgument:
            return False
        return True


def pieces_of(model: ServedModel, text: str) -> list[Piece]:
    assert model.text is not None
    family = tool_family_of(model.text.template)
    assert family is not None
    parser = MessageParser(calls=FAMILIES[family.name].parser(list(SCHEMAS)))
    return parser.feed(text) + parser.flush()


def check_calls(pieces: list[Piece]) -> int:
    """The number of calls; all of them have to be ones of the tools with arguments that they take."""
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return len(calls)


@pytest.fixture(params=list(TEMPLATES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ServedModel:
    return model_of(tmp_path, TEMPLATES[request.param])


def test_a_required_call_is_always_one_that_the_parser_reads(model: ServedModel) -> None:
    body = body_of(tools=tools_for(model), tool_choice="required")
    writer, constraint = Writer(model), constrain(body, model)([])
    counts = []
    for seed in range(30):
        pieces = pieces_of(model, writer.draw(constraint, seed=seed, most=4000))
        assert not [piece for piece in pieces if isinstance(piece, Content)]
        counts.append(check_calls(pieces))
    assert min(counts) == 1
    assert max(counts) > 1


def test_a_named_call_is_of_that_tool_and_alone_where_it_has_to_be(model: ServedModel) -> None:
    choice = {"type": "function", "function": {"name": "ping"}}
    body = body_of(tools=tools_for(model), tool_choice=choice, parallel_tool_calls=False)
    writer, constraint = Writer(model), constrain(body, model)([])
    for seed in range(5):
        assert pieces_of(model, writer.draw(constraint, seed=seed)) == [ToolCall("ping", "{}")]


def test_strict_tools_leave_prose_free_and_bind_calls(model: ServedModel) -> None:
    writer, constraint = Writer(model), constrain(body_of(tools=tools_for(model)), model)([])
    assert writer.takes(constraint, "It is sunny; no call of a tool is needed [or is it?].")
    assert writer.takes(constraint, "")
    forced = constrain(body_of(tools=tools_for(model), tool_choice="required"), model)([])
    for seed in range(10):
        calls = writer.draw(forced, seed=seed, most=4000)
        assert writer.takes(constraint, calls)
        assert not writer.takes(constraint, calls.replace("ping", "pong").replace("weather", "whether"))


def test_an_answer_of_a_schema_beside_tools_is_either_that_or_calls(model: ServedModel) -> None:
    body = body_of(tools=tools_for(model), response_format=JSON_ANSWER)
    writer, constraint = Writer(model), constrain(body, model)([])
    assert writer.takes(constraint, '"yes"')
    assert not writer.takes(constraint, "yes")
    assert check_calls(pieces_of(model, next(
        text for seed in range(40) if (text := writer.draw(constraint, seed=seed, most=4000))[0] != '"'
    )))  # fmt: skip


def test_reasoning_comes_before_the_form(tmp_path: Path) -> None:
    model = model_of(tmp_path, "x</think>")
    body = body_of(response_format=JSON_ANSWER)
    writer, made = Writer(model), constrain(body, model)
    closed, begun = made(tokens_of("assistant\n")), made(tokens_of("assistant\n<think>\n"))
    for text in ('"yes"', '<think>hm {"</think>\n\n"no"'):
        assert writer.takes(closed, text)
    assert not writer.takes(closed, 'hm</think>"no"')
    assert writer.takes(begun, 'hm</think>\n"no"')
    assert not writer.takes(begun, '"no"')
    parser = MessageParser(reasoning=ReasoningParser(begun=True))
    assert parser.feed('hm</think>\n"no"') + parser.flush() == [Reasoning("hm"), Content('"no"')]


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"guided_regex": "a/b\\/c\nd"}, "a/b/c\nd", "a/b/c"),
        ({"regex": "[a-c]+"}, "abc", "d"),
        ({"guided_choice": ["yes", 'n"o']}, 'n"o', "y"),
        ({"guided_json": {"type": "boolean"}}, "true", "1"),
        ({"guided_json": '{"type": "boolean"}'}, "false", "1"),
        ({"json_schema": '{"type": "boolean"}'}, "false", "1"),
        ({"guided_grammar": 'root ::= "x"'}, "x", "y"),
        ({"ebnf": 'start: "x"'}, "x", "y"),
        ({"structured_outputs": {"json": {"const": 1}}}, "1", "2"),
        ({"structured_outputs": {"regex": "a"}}, "a", "b"),
        ({"structured_outputs": {"choice": ["a"]}}, "a", "b"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "a", "b"),
        ({"structured_outputs": {"json_object": True}}, '{"a": [1]}', "[1]"),
        ({"response_format": {"type": "json_object"}}, "{}", "[]"),
        ({"response_format": JSON_ANSWER}, '"no"', "no"),
    ],
)
def test_each_field_asks_for_its_form_also_after_reasoning(
    fields: dict[str, Any], good: str, bad: str, tmp_path: Path
) -> None:
    model = model_of(tmp_path / "plain", "x")
    writer, constraint = Writer(model), constrain(body_of(**fields), model)([])
    assert writer.takes(constraint, good)
    assert not writer.takes(constraint, bad)
    if "response_format" not in fields:
        completion = constrain_completion(CompletionBody.model_validate({"prompt": "a", **fields}))
        assert completion is not None
        assert completion([]) == constraint
    thinking = model_of(tmp_path / "thinking", "x</think>")
    if "grammar" in str(fields) or "ebnf" in fields:
        with pytest.raises(InvalidArgument, match="reasons"):
            constrain(body_of(**fields), thinking)
    else:
        after = constrain(body_of(**fields), thinking)([])
        assert writer.takes(after, f"<think></think>{good}")
        assert not writer.takes(after, f"<think></think>{bad}")


def test_marks_that_are_special_tokens_are_those_tokens(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    mark = tokenizer.token_to_id("[TOOL_CALLS]")
    tokenizer.save(str(file))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": TEMPLATES["mistral"]}))
    model = open_served_model(ServedModelConfig(name="tiny", path=str(tmp_path)), cache_dir=tmp_path)
    compiler = ConstraintCompiler(file, vocab_size=VOCAB_SIZE, eos_token_ids=model.eos_token_ids)
    words = compiler.new_words(1)[0]

    def allowed(constraint: Constraint, *tokens: int) -> list[int]:
        matcher = compiler.compile(constraint)
        matcher.consume(tokens)
        matcher.fill(words)
        found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        return found

    assert allowed(constrain(body_of(tools=TOOLS, tool_choice="required"), model)([])) == [mark]
    strict = constrain(body_of(tools=TOOLS), model)([])
    assert mark in allowed(strict, *tokens_of("Let me see: "))
    assert allowed(strict, *tokens_of("See: "), mark) == [ord(" "), ord("[")]
    assert len(allowed(strict, *tokens_of("[TOOL_CALLS]"))) > 100


def test_no_form_is_no_constraint(model: ServedModel) -> None:
    loose = [{"type": "function", "function": {"name": "f"}}]
    family = tool_family_of(model.text.template) if model.text is not None else None
    for body in (
        body_of(),
        body_of(response_format={"type": "text"}),
        body_of(tools=loose, tool_choice="auto"),
    ):
        assert constrain_chat(body, model, family) is None
    assert constrain_chat(body_of(tools=tools_for(model), tool_choice="none"), model, None) is None
