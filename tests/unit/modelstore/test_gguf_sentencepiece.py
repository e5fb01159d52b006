"""Tokenizers from sentencepiece's vocabulary in a GGUF: best pieces first, spaces, bytes, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from meshkit.errors import InvalidArgument
from meshkit.modelstore import open_model

if TYPE_CHECKING:
    from tests.unit.modelstore.conftest import TinyGguf

BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = {"▁": -9.0, "a": -9.1, "b": -9.2, "c": -9.3, "ab": -3.0, "bc": -2.0, "▁a": -4.0, "▁ab": -1.0}
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def write(tiny: TinyGguf) -> Path:
    tiny.tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    tiny.token_types = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(PIECES))]
    tiny.scores = [0.0] * 259 + list(PIECES.values())
    tiny.shapes["token_embd.weight"] = tiny.shapes["output.weight"] = (len(tiny.tokens), 32)
    tiny.metadata["tokenizer.ggml.model"] = "llama"
    tiny.metadata["tokenizer.ggml.bos_token_id"] = 1
    tiny.metadata["tokenizer.ggml.eos_token_id"] = 2
    return tiny.write()


def tokenizer_of(file: Path, cache_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(open_model(str(file), cache_dir=cache_dir).tokenizer_file))


def test_the_best_piece_is_joined_first_and_texts_begin_with_a_space(
    tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(write(tiny_gguf), tmp_path)
    # "bc" is better than "ab", so "▁ab" never comes about before a "c".
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == ["▁a", "bc"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["▁ab"]
    assert tokenizer.encode("c ab").tokens == ["<s>", "▁", "c", "▁ab"]


def test_what_no_piece_covers_becomes_bytes_and_comes_back(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tiny_gguf), tmp_path)
    made = tokenizer.encode("ab é c")
    assert made.tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>", "▁", "c"]
    assert tokenizer.decode(made.ids) == "ab é c"


def test_a_model_without_a_space_in_front_has_none(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    tiny_gguf.metadata["tokenizer.ggml.add_space_prefix"] = False
    tiny_gguf.metadata["tokenizer.ggml.add_bos_token"] = False
    tokenizer = tokenizer_of(write(tiny_gguf), tmp_path)
    assert tokenizer.encode("ab").tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_a_vocabulary_without_bytes_is_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    write(tiny_gguf)
    tiny_gguf.tokens[3] = "<zero>"
    with pytest.raises(InvalidArgument, match="no tokens of bytes"):
        open_model(str(tiny_gguf.write("other.gguf")), cache_dir=tmp_path)
