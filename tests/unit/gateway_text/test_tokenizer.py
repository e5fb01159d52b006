"""The real tokenizer against the golden file, and our decoding against the library's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.text import IncrementalDetokenizer, Tokenizer
from gateway.text.token_bytes import decoding_rule
from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder
from tests.support.golden import load_golden


def test_golden_prompts_encode_to_the_reference_ids(tokenizer: Tokenizer) -> None:
    for case in load_golden():
        assert tokenizer.encode(case.prompt, add_special_tokens=True) == case.prompt_token_ids


def test_golden_tokens_decode_to_the_reference_text(tokenizer: Tokenizer) -> None:
    for case in load_golden():
        assert tokenizer.decode(case.token_ids, skip_special_tokens=False) == case.text
        assert tokenizer.decode(case.token_ids) == case.text.removesuffix("<|im_end|>")


def test_golden_tokens_streamed_one_by_one_give_the_reference_text(tokenizer: Tokenizer) -> None:
    for case in load_golden():
        stream = IncrementalDetokenizer(tokenizer, case.prompt_token_ids)
        pieces = [stream.feed([token_id]) for token_id in case.token_ids]
        assert "".join(pieces) + stream.flush() == case.text.removesuffix("<|im_end|>")


def test_special_tokens_written_in_the_text_count_as_such(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(ids[1])
    assert tokenizer.decode(ids) == "user\nhi"


def test_digits_are_cut_one_by_one(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" 1969", add_special_tokens=False)
    assert [tokenizer.decode([token_id]) for token_id in ids] == [" ", "1", "9", "6", "9"]


def test_every_token_alone_decodes_as_the_library_decodes_it(
    tokenizer: Tokenizer, smollm2: ModelFolder
) -> None:
    library = tokenizers.Tokenizer.from_file(str(smollm2.tokenizer_file))
    differing = [
        token_id
        for token_id in range(tokenizer.vocab_size)
        if tokenizer.decode([token_id], skip_special_tokens=False)
        != library.decode([token_id], skip_special_tokens=False)
    ]
    assert differing == []


@given(ids=st.lists(st.integers(0, 49151) | st.integers(17, 400), max_size=20))
def test_any_tokens_decode_as_the_library_decodes_them(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == tokenizer._inner.decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet=st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs"]), max_size=60))
def test_what_is_encoded_decodes_to_itself(tokenizer: Tokenizer, text: str) -> None:
    # SmolLM2's vocabulary lacks a token for some bytes that rare characters need; the reference drops them
    # too.
    known = {tokenizer.token_bytes[token_id] for token_id in range(17, 300)}
    assume(all(bytes([byte]) in known for byte in text.encode()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_without_a_token_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([49152, 10**6, -1]) == ""


def test_lone_surrogates_are_refused_by_field(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tokenizer.encode("ab\ud800", add_special_tokens=False)
    assert caught.value.field == "text"


def test_a_damaged_tokenizer_file_is_an_error_of_model_path(smollm2: ModelFolder, tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(InvalidArgument) as caught:
        Tokenizer(replace(smollm2, tokenizer_file=broken))
    assert caught.value.field == "model_path"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    ],
)
def test_a_decoder_that_we_do_not_know_is_refused(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decoding_rule(decoder)
    assert caught.value.field == "model_path"
