"""Answers taken apart: the same whatever the pieces that they come in, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai_http.parsing.hermes import HermesCalls
from gateway.openai_http.parsing.llama3 import TAG, Llama3Calls
from gateway.openai_http.parsing.message import MessageParser
from gateway.openai_http.parsing.mistral import MistralCalls
from gateway.openai_http.parsing.pieces import Content, Piece, Reasoning, ToolCall
from gateway.openai_http.parsing.reasoning import ReasoningParser

NAMES = ("f", "get_weather")
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich \\"old\\" {town}", "days": [1, 2]}}'
WEATHER = ToolCall("get_weather", '{"city": "Zürich \\"old\\" {town}", "days": [1, 2]}')
F = ToolCall("f", "{}")

Make = Callable[[], MessageParser]


def hermes(max_calls: int | None = None) -> MessageParser:
    return MessageParser(calls=HermesCalls(), max_calls=max_calls)


def llama3() -> MessageParser:
    return MessageParser(calls=Llama3Calls(NAMES))


def mistral() -> MessageParser:
    return MessageParser(calls=MistralCalls())


def thinking(*, begun: bool = False) -> MessageParser:
    return MessageParser(reasoning=ReasoningParser(begun=begun), calls=HermesCalls())


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts of one kind as one."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + piece.text)
        else:
            whole.append(piece)
    return whole


def parse(parser: MessageParser, *parts: str) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    return merged(pieces + parser.flush())


NAN = '<tool_call>{"name":"f","arguments":{"x":NaN}}</tool_call>'
SURROGATE = '<tool_call>{"name":"\\ud800"}</tool_call>'
ADA = '{"name": "Ada", "born": 1815}'
F_CALL, F_NAMED = '{"name": "f", "parameters": {}}', "[TOOL_CALLS]f[ARGS]{}"

EXAMPLES: list[tuple[str, Make, str, list[Piece]]] = [
    ("hermes plain", hermes, "Hello  world.\n", [Content("Hello  world.\n")]),
    ("hermes one", hermes, f"<tool_call>\n{CALL}\n</tool_call>", [WEATHER]),
    ("hermes said before", hermes, f"Look.\n\n<tool_call>{CALL}</tool_call>\n", [Content("Look."), WEATHER]),
    ("hermes two", hermes, f"<tool_call>{CALL}</tool_call>\n<tool_call>{F_CALL}</tool_call>", [WEATHER, F]),
    ("hermes without its end", hermes, f"<tool_call>\n{CALL}\n", [WEATHER]),
    ("hermes cut off", hermes, '<tool_call>{"name": "f", "a', [Content('<tool_call>{"name": "f", "a')]),
    ("hermes malformed", hermes, "a <tool_call>no</tool_call> b", [Content("a<tool_call>no</tool_call> b")]),
    ("hermes in a string", hermes, '<tool_call>{"name":"f","arguments":"{}"}</tool_call>', [F]),
    ("hermes text after", hermes, f"<tool_call>{CALL}</tool_call>\n\nDone.", [WEATHER, Content("Done.")]),
    ("a mark that is none", hermes, "1 <tool_cal 2 <tool", [Content("1 <tool_cal 2 <tool")]),
    ("no number that JSON lacks", hermes, NAN, [Content(NAN)]),
    ("no lone surrogate", hermes, SURROGATE, [Content(SURROGATE)]),
    ("llama plain", llama3, " Hello {x}", [Content(" Hello {x}")]),
    ("llama one", llama3, F_CALL, [F]),
    ("llama two", llama3, f"{F_CALL}; {F_CALL}\n", [F, F]),
    ("llama tagged", llama3, f"{TAG}{F_CALL}", [F]),
    ("llama tagged after text", llama3, f"Well. {TAG} {F_CALL}", [Content("Well."), F]),
    ("llama an answer in JSON", llama3, ADA, [Content(ADA)]),
    ("llama cut off", llama3, ' {"name": "f", "par', [Content(' {"name": "f", "par')]),
    ("llama tag alone", llama3, TAG, [Content(TAG)]),
    ("llama code", llama3, f"{TAG}print(1)", [Content(f"{TAG}print(1)")]),
    ("llama text after", llama3, f"{F_CALL} ok", [F, Content("ok")]),
    ("llama not the second", llama3, f'{F_CALL}; {{"a": 1}}', [F, Content('; {"a": 1}')]),
    ("mistral plain", mistral, "Bonjour [TOOL]", [Content("Bonjour [TOOL]")]),
    ("mistral list", mistral, f"[TOOL_CALLS] [{CALL}, {F_CALL}]", [WEATHER, F]),
    ("mistral named", mistral, f"{F_NAMED}[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{{}}", [F, F]),
    ("mistral bare", mistral, "So:\n[TOOL_CALLS]f{} then", [Content("So:"), F, Content("then")]),
    ("mistral malformed", mistral, "[TOOL_CALLS][1]", [Content("[TOOL_CALLS][1]")]),
    ("mistral cut off", mistral, '[TOOL_CALLS] [{"name"', [Content('[TOOL_CALLS] [{"name"')]),
    ("mistral no name", mistral, "[TOOL_CALLS]" + "x" * 600, [Content("[TOOL_CALLS]" + "x" * 600)]),
    ("thought", thinking, "<think>\nHm.\n\nYes.\n</think>\n\n4", [Reasoning("Hm.\n\nYes."), Content("4")]),
    ("no thought", thinking, "It is <think> 4.", [Content("It is <think> 4.")]),
    ("empty thought", thinking, "<think>\n\n</think>\n\nFour", [Content("Four")]),
    ("thought cut off", thinking, " <think>one </thi", [Reasoning("one </thi")]),
    ("thought begun", lambda: thinking(begun=True), "so</think>4", [Reasoning("so"), Content("4")]),
    ("thought, then a call", thinking, f"<think>a</think>\n<tool_call>{CALL}", [Reasoning("a"), WEATHER]),
    ("half a mark at the start", thinking, "<thi", [Content("<thi")]),
    ("blank", thinking, " \n", [Content(" \n")]),
]


@pytest.mark.parametrize(
    ("make", "text", "expected"), [each[1:] for each in EXAMPLES], ids=[each[0] for each in EXAMPLES]
)
def test_an_answer_is_parsed_alike_whole_by_character_and_cut_in_two_anywhere(
    make: Make, text: str, expected: list[Piece]
) -> None:
    assert parse(make(), text) == expected
    assert parse(make(), *text) == expected
    for cut in range(1, len(text)):
        assert parse(make(), text[:cut], text[cut:]) == expected, (text[:cut], text[cut:])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", TAG, "[TOOL_CALLS]", "[ARGS]", '{"name": "f"}',
    CALL, "{", "}", "[", "]", '"', "\\", ";", " ", "\n", "f", "<", "[{", '{"a": {}}',
]  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
def test_any_text_is_parsed_alike_however_it_is_cut(fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    parts = [text[start:end] for start, end in pairwise(places)]
    for make in (hermes, llama3, mistral, thinking):
        whole = parse(make(), text)
        assert parse(make(), *parts) == whole
        for call in whole:
            if isinstance(call, ToolCall):
                assert isinstance(json.loads(call.arguments), dict)


def test_only_the_first_call_is_given_where_calls_in_parallel_are_not_wanted() -> None:
    two = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert parse(hermes(max_calls=1), two) == [WEATHER]


def test_content_without_a_call_comes_out_as_it_comes_in() -> None:
    parser = hermes()
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <b") == [Content(" <b")]
    assert parser.feed(" <tool") == []


def test_a_long_call_is_one_call() -> None:
    parser = hermes()
    parser.feed('<tool_call>{"name": "f", "arguments": {"text": "')
    for _ in range(5_000):
        assert parser.feed("words ") == []
    (call,) = parser.feed('"}}</tool_call>')
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"text": "words " * 5_000}
    assert parser.flush() == []
