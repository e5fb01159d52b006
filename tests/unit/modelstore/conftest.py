"""The small real model, as scripts/test.sh pulls it beforehand, and GGUFs small enough to break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from meshkit.modelstore.locations import pulled_model_dir


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    cache_dir = default_cache_dir()
    if not pulled_model_dir("smollm2-135m", cache_dir=cache_dir).is_dir():
        pytest.skip(f"smollm2-135m is not in {cache_dir}; `chipmesh pull smollm2-135m` fetches it")
    return open_model("smollm2-135m", cache_dir=cache_dir)


class TinyGguf:
    """Writes Llama GGUFs of a few kilobytes: 2 layers, hidden 32, 4 heads over 2, 270 tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: dict[str, Any] = {
            "llama.context_length": 64,
            "llama.embedding_length": 32,
            "llama.block_count": 2,
            "llama.feed_forward_length": 64,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.rope.dimension_count": 8,
            "llama.rope.freq_base": 10000.0,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.bos_token_id": 0,
        }
        alphabet = sorted(ByteLevel.alphabet())
        self.tokens = ["<s>", "</s>", *alphabet, "He", "ll", "<tool>"]
        self.token_types = [3, 3, *([1] * 256), 1, 1, 4]
        self.merges = ["H e", "l l"]
        self.scores: list[float] = []
        self.shapes = {
            "token_embd.weight": (len(self.tokens), 32),
            "output_norm.weight": (32,),
            "output.weight": (len(self.tokens), 32),
        }
        for layer in range(2):
            self.shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in _LAYER_SHAPES.items()}

    def write(self, name: str = "tiny.gguf", *, architecture: str = "llama", raw_type: Any = None) -> Path:
        """The file's path; `raw_type` stores token_embd in that ggml encoding."""
        file = self.folder / name
        writer = gguf.GGUFWriter(file, architecture)
        for key, value in self.metadata.items():
            _add(writer, key, value)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        random = np.random.default_rng(0)
        for tensor, shape in self.shapes.items():
            values = random.normal(size=shape).astype(np.float32)
            if raw_type is not None and tensor == "token_embd.weight":
                writer.add_tensor(tensor, gguf.quants.quantize(values, raw_type), raw_dtype=raw_type)
            else:
                writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file


_LAYER_SHAPES = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_string(key, value)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> TinyGguf:
    folder = tmp_path / "gguf"
    folder.mkdir()
    return TinyGguf(folder)
