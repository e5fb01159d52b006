"""Stop strings over any split of the text, against a plain search."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text import StopMatcher
from meshkit.errors import InvalidArgument


def stream(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """All that a client would be sent, piece by piece, and the stop string that ended it."""
    sent: list[str] = []
    for piece in pieces:
        result = matcher.feed(piece)
        sent.append(result.text_to_emit)
        if result.matched is not None:
            return sent, result.matched
    sent.append(matcher.flush().text_to_emit)
    return sent, None


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The oracle: the first end at which some stop string is complete, the longest of those."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_possible_start(text: str, stops: list[str]) -> int:
    """The oracle for what may be held back: the longest end of the text that begins a stop string."""
    sizes = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(sizes, default=0)


FEW_LETTERS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    text = draw(FEW_LETTERS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@given(pieces=split_texts(), stops=STOPS)
def test_every_split_gives_what_a_search_of_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    sent, matched = stream(StopMatcher(stops), pieces)
    assert ("".join(sent), matched) == search("".join(pieces), stops)


@given(text=FEW_LETTERS, stops=STOPS)
def test_only_the_longest_possible_start_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for end, char in enumerate(text, start=1):
        result = matcher.feed(char)
        emitted += result.text_to_emit
        if result.matched is not None:
            return
        assert len(emitted) == end - longest_possible_start(text[:end], stops)


def test_a_stop_string_split_over_three_tokens_is_never_streamed() -> None:
    sent, matched = stream(StopMatcher(["DEFGHIJ"]), ["ABC", "DEF", "G", "HI", "J", "K"])
    assert (sent, matched) == (["ABC", "", "", "", ""], "DEFGHIJ")


def test_held_text_is_released_when_the_match_fails() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.feed("ABCDEFG").text_to_emit == "ABC"
    assert matcher.feed("HIX").text_to_emit == "DEFGHIX"


def test_held_text_comes_out_at_the_end_of_the_stream() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.feed("line\n").text_to_emit == "line"
    assert matcher.flush().text_to_emit == "\n"
    assert matcher.flush().text_to_emit == ""


def test_of_two_stops_that_end_together_the_longer_one_is_taken_so_nothing_of_it_leaks() -> None:
    assert stream(StopMatcher(["c", "abc"]), ["xa", "b", "c"]) == (["x", "", ""], "abc")


def test_text_after_the_match_is_dropped() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("go stop here").text_to_emit == "go "
    after = matcher.feed("and on")
    assert (after.text_to_emit, after.matched) == ("", "stop")
    assert matcher.flush().text_to_emit == ""


def test_without_stops_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything").text_to_emit == "anything"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        StopMatcher(["x", ""])
    assert caught.value.field == "stop"
