"""Writes a model of `transformers` as llama.cpp's converter would: its names, orders, sums and stacks.

Names come from the `gguf` package, so that nothing of ours is compared with itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float32]

KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(folder: Path, config: Any, file: Path) -> Path:
    """folder: as `transformers` saved it. Everything in float32."""
    architecture = config.architectures[0]
    kind = KINDS[architecture]
    writer = gguf.GGUFWriter(file, kind)
    _add_metadata(writer, config, kind)
    _add_vocabulary(writer, config.vocab_size)
    stored: dict[str, Array] = {}
    for part in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(part))
    names = gguf.get_tensor_name_map(
        next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == kind), config.num_hidden_layers
    )
    for name, values in _converted(stored, config, kind):
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        writer.add_tensor(written, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _converted(stored: Mapping[str, Array], config: Any, kind: str) -> Iterator[tuple[str, Array]]:
    stacks: dict[str, dict[int, Array]] = {}
    for name, values in stored.items():
        if match := _EXPERT.fullmatch(name):
            block = match[1].replace("block_sparse_moe", "feed_forward").removeprefix("model.")
            block = block if "feed_forward" in block else f"model.{block}"
            stacks.setdefault(f"{block}.{match[3]}.weight", {})[int(match[2])] = values
        elif kind == "llama" and (heads := _heads_of(name, config)):
            yield name, _interleave(values, heads)
        elif kind.startswith("gemma") and name.endswith("norm.weight"):
            yield name, values + np.float32(1)
        else:
            yield name, values
    for name, experts in stacks.items():
        yield name, np.stack([experts[index] for index in range(len(experts))])


def _heads_of(name: str, config: Any) -> int:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return int(heads.get(name.split(".")[-2], 0))


def _interleave(rows: Array, heads: int) -> Array:
    """Halves of each head to pairs, as llama.cpp's rotary positions of this kind want them."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    made: Array = halves.swapaxes(1, 2).reshape(rows.shape)
    return made


def _add_metadata(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_rope(writer, config.rope_parameters)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if kind.startswith("gemma2"):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if inner := getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(inner)
        if inner := getattr(config, "shared_expert_intermediate_size", None):
            writer.add_expert_shared_feed_forward_length(inner)


def _add_rope(writer: gguf.GGUFWriter, parameters: Mapping[str, Any]) -> None:
    parameters = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(parameters["rope_theta"])
    kind = parameters["rope_type"]
    if kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(parameters["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Letters, and one pair of them: what is in it does not matter here."""
    tokens = [chr(0x100 + index) for index in range(size - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, tokens[0] + tokens[1]])
    writer.add_token_types([1] * size)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
