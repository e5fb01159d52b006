"""Output that a client brings: wherever it lost the stream, its text and tokens go on as if it had not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation_spec import Finish, FinishReason, GenerationSpec, Placed, Sampling, StopConditions
from gateway.given_output import check_agrees, check_same, take_in
from gateway.live_request import LiveRequest
from gateway.models import ServedModel
from gateway.output_text import OutputText
from gateway.text import IncrementalDetokenizer
from meshkit.errors import AlreadyExists, InvalidArgument
from tests.unit.gateway.tiny_model import IM_END, tokens_of


class Unobserved:
    """An observer that is not interested."""

    def on_queued(self) -> None: ...
    def on_placed(self, placement: Placed) -> None: ...
    def on_tokens(self, count: int) -> None: ...
    def on_end(self, request: LiveRequest) -> None: ...


def make_request(
    model: ServedModel,
    *,
    stops: Sequence[str] = (),
    max_tokens: int = 1000,
    min_tokens: int = 0,
    given: Sequence[int] = (),
    temperature: float = 1.0,
    seed: int = 1,
    seed_is_drawn: bool = False,
) -> LiveRequest:
    prompt = tokens_of("hi")
    spec = GenerationSpec(
        request_id="mine", model=model.name, prompt_token_ids=prompt,
        sampling=Sampling(temperature, 0, 1.0, 0.0, 1.0, 0.0, 0.0, seed=seed), seed_is_drawn=seed_is_drawn,
        stop=StopConditions(max_tokens, tuple(stops), min_tokens=min_tokens), end_token_ids=(IM_END,),
    )  # fmt: skip
    assert model.text is not None
    detokenizer = IncrementalDetokenizer(model.text.tokenizer, prompt)
    text = OutputText(detokenizer, stop_strings=stops, min_tokens=min_tokens)
    return LiveRequest(spec, text=text, observer=Unobserved(), given=take_in(given, spec, text))


async def pieces_of(request: LiveRequest, next_index: int) -> list[tuple[list[int], str]]:
    reader = request.attach(next_index)
    return [(list(output.token_ids), output.text) async for output in reader]


def joined(pieces: list[tuple[list[int], str]]) -> tuple[list[int], str]:
    return [token for tokens, _ in pieces for token in tokens], "".join(text for _, text in pieces)


@given(
    text=st.text(alphabet="ab漢🙂é", max_size=12),
    stops=st.lists(st.text(alphabet="ab漢🙂", min_size=1, max_size=3), max_size=3),
    cut_character=st.booleans(),
    min_tokens=st.integers(0, 6),
    ends=st.sampled_from(["end token", "max_tokens", "elsewhere"]),
)
def test_what_two_gateways_say_adds_up_wherever_the_stream_breaks(
    tiny: ServedModel, text: str, stops: list[str], cut_character: bool, min_tokens: int, ends: str
) -> None:
    tokens = tokens_of(text)[: -1 if cut_character else None]
    if ends == "end token":
        tokens += [IM_END] if len(tokens) >= min_tokens else []
    limit = max(len(tokens), 1) if ends == "max_tokens" else 1000

    def play(had: Sequence[int]) -> LiveRequest:
        request = make_request(
            tiny, stops=stops, max_tokens=limit, min_tokens=min(min_tokens, limit), given=had
        )
        if not request.finish_if_complete():
            request.on_tokens(0, tokens)
            request.finish_if_complete()
            request.finish(FinishReason.LENGTH)
        return request

    async def run() -> None:
        whole = play([])
        pieces = await pieces_of(whole, 0)
        all_tokens, all_text = joined(pieces)
        for cut in range(len(all_tokens) + 1):
            # What a client has that got these tokens: an output without any is void unless the end followed.
            seen = make_request(tiny, stops=stops, max_tokens=limit, min_tokens=min(min_tokens, limit))
            seen.on_tokens(0, all_tokens[:cut])
            reader = seen.attach()
            had = reader.take()
            text_had = "" if had is None else had.text
            resumed = play(all_tokens[:cut])
            rest_tokens, rest_text = joined(await pieces_of(resumed, cut))
            assert all_tokens[:cut] + rest_tokens == all_tokens
            assert text_had + rest_text == all_text
            assert resumed.token_ids == whole.token_ids
            assert resumed.end == whole.end

    asyncio.run(run())


async def test_text_held_back_to_the_end_comes_alone_and_last(tiny: ServedModel) -> None:
    request = make_request(tiny, stops=["cde"])
    request.on_tokens(0, tokens_of("abcd"))
    request.finish(FinishReason.LENGTH)
    assert await pieces_of(request, 0) == [(tokens_of("abcd"), "ab"), ([], "cd")]
    assert await pieces_of(request, 4) == [([], "cd")]


async def test_a_reader_that_is_ahead_waits_for_its_place_or_the_end(tiny: ServedModel) -> None:
    request = make_request(tiny)
    reader, beyond = request.attach(), request.attach()
    waiting = [asyncio.create_task(reader.skip_to(3)), asyncio.create_task(beyond.skip_to(9))]
    for index, token in enumerate(tokens_of("ab")):
        request.on_tokens(index, [token])
        await asyncio.sleep(0)
    assert not waiting[0].done()
    request.on_tokens(2, tokens_of("cd"))
    await waiting[0]
    output = reader.take()
    assert output is not None
    assert (output.first_index, output.text) == (3, "d")
    assert not waiting[1].done()
    request.finish(FinishReason.LENGTH)
    await waiting[1]
    assert beyond.take() is None


async def test_given_tokens_count_as_made_and_have_no_logprobs(tiny: ServedModel) -> None:
    request = make_request(tiny, given=tokens_of("abc"))
    assert repr(request) == "<LiveRequest mine 3 tokens waiting>"
    assert request.given_count == 3
    request.on_tokens(3, tokens_of("d"))
    assert list(request.token_ids) == tokens_of("abcd")


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        (tokens_of("abc"), None),
        ([97, IM_END], Finish(FinishReason.STOP)),
        (tokens_of("aEND"), Finish(FinishReason.STOP, "END")),
        (tokens_of("abcde"), Finish(FinishReason.LENGTH)),
        ([IM_END], None),
        (tokens_of("E"), None),
    ],
    ids=[
        "goes on",
        "end token",
        "stop string",
        "max_tokens",
        "end before min_tokens",
        "part of a stop string",
    ],
)
async def test_given_tokens_say_whether_the_generation_is_complete(
    tiny: ServedModel, tokens: list[int], end: Finish | None
) -> None:
    request = make_request(tiny, given=tokens, stops=["END"], max_tokens=5, min_tokens=2)
    assert request.finish_if_complete() is (end is not None)
    assert request.end == end


@pytest.mark.parametrize(
    ("tokens", "field"),
    [
        (tokens_of("abcdef"), "output_token_ids"),
        ([97, IM_END, 98], "output_token_ids[2]"),
        (tokens_of("aENDx"), "output_token_ids[4]"),
    ],
)
def test_tokens_after_an_end_are_refused(tiny: ServedModel, tokens: list[int], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_request(tiny, given=tokens, stops=["END"], max_tokens=5)
    assert caught.value.field == field


def test_only_tokens_that_the_request_has_are_compared(tiny: ServedModel) -> None:
    live = make_request(tiny)
    live.on_tokens(0, tokens_of("abc"))
    for tokens in ([], tokens_of("ab"), tokens_of("abc"), tokens_of("abcd")):
        check_agrees(tokens, live)
    with pytest.raises(InvalidArgument, match=r"output_token_ids\[1\] is 120"):
        check_agrees(tokens_of("axc"), live)
    live.finish(FinishReason.STOP)
    with pytest.raises(InvalidArgument, match=r"output_token_ids\[3\] comes after the end"):
        check_agrees(tokens_of("abcd"), live)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ((1.0, 5, True), (1.0, 5, False), True),
        ((1.0, 5, True), (1.0, 9, True), True),
        ((1.0, 5, False), (1.0, 9, True), False),
        ((1.0, 5, True), (1.0, 9, False), False),
        ((0.0, 5, False), (0.0, 9, False), True),
        ((0.0, 5, False), (1.0, 5, False), False),
    ],
    ids=[
        "as told",
        "drawn both times",
        "set, then left out",
        "drawn, then another",
        "greedy",
        "no longer greedy",
    ],
)
def test_a_seed_makes_another_request_only_where_it_was_chosen_and_counts(
    tiny: ServedModel, first: tuple[float, int, bool], second: tuple[float, int, bool], same: bool
) -> None:
    live, again = (
        make_request(tiny, temperature=temperature, seed=seed, seed_is_drawn=drawn)
        for temperature, seed, drawn in (first, second)
    )
    if same:
        check_same(again.spec, live)
    else:
        with pytest.raises(AlreadyExists, match="'mine' belongs to a request here"):
            check_same(again.spec, live)
