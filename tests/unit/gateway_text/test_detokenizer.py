"""Streams of tokens that cut characters anywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders
from tokenizers.models import BPE

from gateway.text import IncrementalDetokenizer, Tokenizer
from meshkit.modelstore import ModelFolder

REPLACEMENT = "\ufffd"
HARD_TEXTS = ["🙂", "👩‍👩‍👧‍👦 family", "日本語のテキスト", "naïve 🇫🇷 café", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "a🙂b漢c"]


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    id_of = {tokenizer.token_bytes[token_id]: token_id for token_id in range(17, 300)}
    return [id_of[bytes([byte])] for byte in data]


def stream(
    tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], emitted: list[int] | None = None
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, emitted_token_ids=emitted or [])
    return [*(detokenizer.feed(chunk) for chunk in chunks), detokenizer.flush()]


def test_the_vocabulary_has_a_token_for_every_byte(tokenizer: Tokenizer) -> None:
    assert len(byte_tokens(tokenizer, bytes(range(0x21, 0x7F)))) == 94


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_at_every_split_of_a_text_no_half_character_comes_out(tokenizer: Tokenizer, text: str) -> None:
    for ids in (tokenizer.encode(text, add_special_tokens=False), byte_tokens(tokenizer, text.encode())):
        for cut in range(len(ids) + 1):
            pieces = stream(tokenizer, [], [ids[:cut], ids[cut:]])
            assert "".join(pieces) == text
            assert REPLACEMENT not in "".join(pieces)
        assert "".join(stream(tokenizer, [], [[token_id] for token_id in ids])) == text


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_prompt_that_ends_inside_a_character_is_never_repeated(tokenizer: Tokenizer, text: str) -> None:
    before = tokenizer.encode("The prompt: ", add_special_tokens=False)
    ids = byte_tokens(tokenizer, text.encode())
    for cut in range(len(ids)):
        prompt_text = text.encode()[:cut].decode("utf-8", "ignore")
        pieces = stream(tokenizer, before + ids[:cut], [[token_id] for token_id in ids[cut:]])
        assert "".join(pieces) == text[len(prompt_text) :]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_replayed_stream_goes_on_exactly_where_it_stood(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode("Say: ", add_special_tokens=False)
    ids = byte_tokens(tokenizer, text.encode())
    for cut in range(len(ids)):
        whole = stream(tokenizer, prompt, [ids[:cut], ids[cut:]])
        assert stream(tokenizer, prompt, [ids[cut:]], emitted=ids[:cut]) == whole[1:]


def test_an_invalid_byte_becomes_one_replacement_character_once_it_is_certain(tokenizer: Tokenizer) -> None:
    half, letter = byte_tokens(tokenizer, "🙂".encode()[:2]), byte_tokens(tokenizer, b"x")
    assert stream(tokenizer, [], [half, letter]) == ["", REPLACEMENT + "x", ""]
    assert stream(tokenizer, [], [half]) == ["", REPLACEMENT]


def test_an_invalid_byte_of_the_prompt_stays_the_prompts(tokenizer: Tokenizer) -> None:
    half, letter = byte_tokens(tokenizer, "🙂".encode()[:2]), byte_tokens(tokenizer, b"x")
    assert stream(tokenizer, half, [letter]) == ["x", ""]
    assert stream(tokenizer, half, [[]]) == ["", ""]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("done", add_special_tokens=False), 2]
    assert IncrementalDetokenizer(tokenizer, []).feed(ids) == "done"
    assert IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False).feed(ids) == "done<|im_end|>"


ANY_IDS = st.lists(st.integers(17, 300) | st.integers(0, 49151), max_size=16)


@given(prompt=ANY_IDS, ids=ANY_IDS, cuts=st.lists(st.integers(0, 16), max_size=5))
def test_any_chunking_adds_up_to_the_whole_text_less_the_prompts(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], cuts: list[int]
) -> None:
    bounds = [0, *sorted(cuts), len(ids)]
    chunks = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    prompt_text, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    # What the prompt left incomplete shows as U+FFFD in its own text; the continuation may turn it into a
    # character.
    settled = prompt_text if whole.startswith(prompt_text) else prompt_text.removesuffix(REPLACEMENT)
    assert whole.startswith(settled)
    assert "".join(stream(tokenizer, prompt, chunks)) == whole[len(settled) :]


@given(prompt=ANY_IDS, ids=ANY_IDS)
def test_each_tokens_text_is_what_it_would_be_alone(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    one_by_one, together = (
        IncrementalDetokenizer(tokenizer, prompt),
        IncrementalDetokenizer(tokenizer, prompt),
    )
    assert together.feed_each(ids) == [one_by_one.feed([token_id]) for token_id in ids]
    assert together.flush() == one_by_one.flush()


@pytest.fixture(scope="session")
def sentencepiece(smollm2: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that decodes as Llama 2's does: ▁ for spaces, byte tokens, one space in front dropped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "!"]
    inner = LibraryTokenizer(
        BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    file: Path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.json"
    inner.save(str(file))
    return Tokenizer(replace(smollm2, tokenizer_file=file))


def test_the_space_in_front_is_dropped_at_the_start_of_a_text_only(sentencepiece: Tokenizer) -> None:
    hello, world, mark = 257, 258, 259
    ids = [hello, world, mark]
    assert sentencepiece.decode(ids) == sentencepiece._inner.decode(ids) == "Hello world!"
    assert stream(sentencepiece, [], [[hello], [world], [mark]]) == ["Hello", " world", "!", ""]
    assert stream(sentencepiece, [hello], [[world], [mark]]) == [" world", "!", ""]


def test_byte_tokens_add_up_to_a_character(sentencepiece: Tokenizer) -> None:
    ids = [257, *(1 + byte for byte in "🙂".encode())]
    assert stream(sentencepiece, [], [[token_id] for token_id in ids]) == ["Hello", "", "", "", "🙂", ""]
    assert sentencepiece.decode(ids) == sentencepiece._inner.decode(ids) == "Hello🙂"
