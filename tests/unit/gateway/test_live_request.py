"""One request's state: whatever the cuts, the batches and the readers, the same tokens and the same text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation_spec import Finish, FinishReason, GenerationSpec, Placed, Sampling, StopConditions
from gateway.live_request import LiveRequest, OutputReader
from gateway.models import ServedModel
from gateway.output_text import OutputText
from gateway.text import IncrementalDetokenizer
from meshkit.errors import Internal, MeshError, Unavailable
from tests.unit.gateway.tiny_model import IM_END, tokens_of


class Observed:
    """Records what an observer is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_queued(self) -> None:
        self.told.append("queued")

    def on_placed(self, placement: Placed) -> None:
        self.told.append(f"placed on {placement.worker}")

    def on_tokens(self, count: int) -> None:
        self.told.append(f"{count} tokens")

    def on_end(self, request: LiveRequest) -> None:
        assert request.has_ended
        self.told.append("end")


def make_request(
    model: ServedModel, *, stop_strings: Sequence[str] = (), max_tokens: int = 1000, min_tokens: int = 0
) -> tuple[LiveRequest, Observed]:
    prompt = tokens_of("hi")
    spec = GenerationSpec(
        request_id="mine", model=model.name, prompt_token_ids=prompt,
        sampling=Sampling(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, seed=1),
        stop=StopConditions(max_tokens, tuple(stop_strings), min_tokens=min_tokens), end_token_ids=(IM_END,),
    )  # fmt: skip
    assert model.text is not None
    text = OutputText(
        IncrementalDetokenizer(model.text.tokenizer, prompt), stop_strings=stop_strings, min_tokens=min_tokens
    )
    observed = Observed()
    return LiveRequest(spec, text=text, observer=observed), observed


def text_of(reader: OutputReader) -> str:
    taken = reader.take()
    return "" if taken is None else taken.text


async def read_all(reader: OutputReader) -> tuple[list[int], str]:
    outputs = [output async for output in reader]
    return [token for output in outputs for token in output.token_ids], "".join(o.text for o in outputs)


@given(
    text=st.text(alphabet="ab漢🙂é", max_size=20),
    stops=st.lists(st.text(alphabet="ab漢🙂", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 80), max_size=8),
    overlap=st.integers(0, 3),
)
def test_text_and_tokens_do_not_depend_on_batches_repetitions_or_readers(
    tiny: ServedModel, text: str, stops: list[str], cuts: list[int], overlap: int
) -> None:
    async def run() -> None:
        tokens = tokens_of(text)
        request, _ = make_request(tiny, stop_strings=stops)
        reader = request.attach()
        resumable: list[tuple[int, str]] = [(0, "")]
        seen: list[int] = []
        pieces = ""
        edges = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
        for start, end in pairwise(edges):
            first = max(0, start - overlap)
            request.on_tokens(first, tokens[first:end])
            if (taken := reader.take()) is not None:
                seen += taken.token_ids
                pieces += taken.text
            resumable.append((len(seen), pieces))
        request.finish(FinishReason.LENGTH)
        last_ids, last_text = await read_all(reader)
        expected, matched = cut_at_first_stop(text, stops)
        assert isinstance(request.end, Finish)
        assert request.end.matched_stop == matched
        assert pieces + last_text == expected
        assert seen + last_ids == (tokens[: len(request.token_ids)] if matched else tokens)
        # A client that had read up to any of those places and comes back there has the whole text.
        for index, had in resumable:
            ids, more = await read_all(request.attach(index))
            assert had + more == expected
            assert [*tokens[:index], *ids] == list(request.token_ids)

    asyncio.run(run())


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str]:
    """The text before the stop string that is complete first (the longest of those), by trying every end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


async def test_a_request_tells_its_observer_each_thing_once(tiny: ServedModel) -> None:
    request, observed = make_request(tiny, stop_strings=["c"])
    request.on_queued()
    request.on_queued()
    request.on_tokens(0, tokens_of("ab"))
    request.on_tokens(0, tokens_of("ab"))
    request.on_tokens(2, tokens_of("cde"))
    request.on_tokens(3, tokens_of("de"))
    request.finish(FinishReason.LENGTH)
    request.fail(Internal("late"))
    request.on_placed(Placed(group="late"), cached_tokens=9)
    assert observed.told == ["queued", "2 tokens", "1 tokens", "end"]
    assert request.end == Finish(FinishReason.STOP, "c")
    assert request.placement == Placed()
    assert request.cached_tokens is None


async def test_a_reader_takes_all_that_came_since_it_last_looked(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    reader = request.attach()
    assert reader.take() is None
    for index, token in enumerate(tokens_of("abc")):
        request.on_tokens(index, [token])
    output = reader.take()
    assert output is not None
    assert (output.first_index, list(output.token_ids), output.text) == (0, tokens_of("abc"), "abc")
    assert reader.take() is None


async def test_a_waiting_reader_wakes_for_tokens_and_for_the_end(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    reading = asyncio.create_task(read_all(request.attach()))
    await asyncio.sleep(0)
    request.on_tokens(0, tokens_of("a"))
    await asyncio.sleep(0)
    request.on_tokens(1, tokens_of("b"))
    await asyncio.sleep(0)
    assert not reading.done()
    request.finish(FinishReason.LENGTH)
    assert await reading == (tokens_of("ab"), "ab")


async def test_a_failed_request_gives_what_it_has_and_then_its_error(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    reader = request.attach()
    request.on_tokens(0, tokens_of("a"))
    request.fail(Unavailable("gone"))
    assert text_of(reader) == "a"
    with pytest.raises(Unavailable, match="gone"):
        await reader.__anext__()


async def test_waiting_for_the_scheduler_ends_with_its_refusal(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    waiting = asyncio.create_task(request.wait_queued())
    await asyncio.sleep(0)
    assert not waiting.done()
    request.fail(Unavailable("full"))
    with pytest.raises(MeshError, match="full"):
        await waiting
    assert not request.is_queued


async def test_a_gap_names_both_indexes(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    request.on_tokens(0, tokens_of("ab"))
    request.on_tokens(5, tokens_of("c"))
    assert isinstance(request.end, Internal)
    assert request.end.metadata == {"next_index": "2", "sent_index": "5"}
    assert list(request.token_ids) == tokens_of("ab")


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([97, IM_END], FinishReason.STOP),
        (tokens_of("abcd"), FinishReason.LENGTH),
        (tokens_of("abc"), None),
        ([], None),
        ([IM_END], None),
    ],
    ids=["end token", "all tokens", "more to come", "nothing yet", "end token before min_tokens"],
)
async def test_a_requests_own_tokens_say_whether_it_has_ended(
    tiny: ServedModel, tokens: list[int], reason: FinishReason | None
) -> None:
    request, _ = make_request(tiny, max_tokens=4, min_tokens=2)
    request.on_tokens(0, tokens)
    assert request.finish_if_complete() is (reason is not None)
    assert request.end == (None if reason is None else Finish(reason))


async def test_a_request_shows_its_state_in_a_word(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    assert repr(request) == "<LiveRequest mine 0 tokens waiting>"
    request.on_queued()
    request.on_tokens(0, tokens_of("ab"))
    assert repr(request) == "<LiveRequest mine 2 tokens streaming>"
    request.finish(FinishReason.CANCELLED)
    assert repr(request) == "<LiveRequest mine 2 tokens finished cancelled>"


async def test_a_request_that_nobody_reads_costs_few_bytes_a_token(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    for index in range(10_000):
        request.on_tokens(index, [97], [-1.0])
    held = sum(part.itemsize * len(part) for part in (request.token_ids, request.logprobs))
    assert held + request.text.end + 4 * len(request.token_ids) <= 256 * 1024


async def test_the_first_piece_leaves_at_once_and_tokens_gather_for_the_next(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    reader = request.attach(pause_s=lambda: 0.02)
    request.on_tokens(0, tokens_of("a"))
    assert (await reader.__anext__()).text == "a"
    reading = asyncio.create_task(reader.__anext__())
    for index, token in enumerate(tokens_of("bcd"), start=1):
        request.on_tokens(index, [token])
        await asyncio.sleep(0)
        assert not reading.done()
    assert (await reading).text == "bcd"
    request.detach(reader)


async def test_tokens_that_came_before_the_reader_looked_again_gather_too(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    reader = request.attach(pause_s=lambda: 3600.0)
    request.on_tokens(0, tokens_of("a"))
    await reader.__anext__()
    request.on_tokens(1, tokens_of("b"))
    reading = asyncio.create_task(reader.__anext__())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not reading.done()
    request.finish(FinishReason.LENGTH)
    assert (await reading).text == "b"
    request.detach(reader)


async def test_the_end_of_a_request_does_not_wait_for_the_pause(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    reader = request.attach(pause_s=lambda: 3600.0)
    request.on_tokens(0, tokens_of("a"))
    await reader.__anext__()
    reading = asyncio.create_task(read_all(reader))
    await asyncio.sleep(0)
    request.on_tokens(1, tokens_of("b"))
    request.finish(FinishReason.LENGTH)
    assert await asyncio.wait_for(reading, 5) == (tokens_of("b"), "b")
    request.detach(reader)


async def test_a_piece_comes_after_the_pause_though_nothing_came_within_it(tiny: ServedModel) -> None:
    request, _ = make_request(tiny)
    reader = request.attach(pause_s=lambda: 0.001)
    request.on_tokens(0, tokens_of("a"))
    await reader.__anext__()
    reading = asyncio.create_task(reader.__anext__())
    await asyncio.sleep(0.01)
    request.on_tokens(1, tokens_of("b"))
    assert (await reading).text == "b"
    request.detach(reader)
