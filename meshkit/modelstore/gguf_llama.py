"""Translates a Llama GGUF's metadata and tensor names into Hugging Face's config.json and names."""

from __future__ import annotations

import struct
from typing import Any

from meshkit.modelstore.gguf_header import GgufHeader, GgufTensor
from meshkit.modelstore.problems import model_path_error
from meshkit.modelstore.weight_index import TensorEntry, WeightIndex, stored_bytes

SUPPORTED_GGUF_ARCHITECTURES: tuple[str, ...] = ("llama",)

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Per pair of dimensions, by what its rotary frequency is divided (Llama 3.1 and later); goes into
# config.json.
_ROPE_FACTORS = "rope_freqs.weight"


def check_architecture(header: GgufHeader) -> None:
    """Raise InvalidArgument (model_path) unless the GGUF is of an architecture that we run."""
    found = header.metadata.get("general.architecture")
    experts = header.metadata.get("llama.expert_count", 0)
    if found not in SUPPORTED_GGUF_ARCHITECTURES or experts:
        described = f"{found} with {experts} experts" if experts else found
        raise model_path_error(
            f"{header.file} is of architecture {described}; supported GGUF architectures: "
            f"{', '.join(SUPPORTED_GGUF_ARCHITECTURES)} (LlamaForCausalLM)",
            reason="ARCHITECTURE_UNSUPPORTED",
        )


def read_config(header: GgufHeader) -> dict[str, Any]:
    """The Hugging Face configuration of a Llama GGUF."""
    heads = _integer(header, "llama.attention.head_count")
    hidden = _integer(header, "llama.embedding_length")
    head_dim = _integer(header, "llama.attention.key_length", hidden // heads)
    names = {tensor.name for tensor in header.tensors}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _integer(header, "llama.feed_forward_length"),
        "num_hidden_layers": _integer(header, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(header, "llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": _integer(header, "llama.context_length"),
        "rope_theta": _single(header.metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(header, head_dim=head_dim),
        "rms_norm_eps": _single(header.metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-6)),
        "hidden_act": "silu",
        "attention_bias": any(name.endswith("attn_q.bias") for name in names),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in names),
        "tie_word_embeddings": "output.weight" not in names,
    }
    for word in ("bos", "eos"):
        config[f"{word}_token_id"] = header.metadata.get(f"tokenizer.ggml.{word}_token_id")
    return config


def _integer(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if not isinstance(value, int) or value <= 0:
        raise model_path_error(
            f"{key} of {header.file} has to be a positive integer, not {value!r}", reason="CONFIG_DAMAGED"
        )
    return value


def _vocab_size(header: GgufHeader) -> int:
    # The embedding's rows are what the model can take; a vocabulary may be shorter than its padded embedding.
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise model_path_error(f"{header.file} has no token_embd.weight", reason="TENSOR_MISSING")


def _single(value: float) -> float:
    """The shortest decimal that is the same float32, so that 9.999999747e-06 reads 1e-05 again."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == packed:
            return short
    return value


def _rope_scaling(header: GgufHeader, *, head_dim: int) -> dict[str, Any] | None:
    rotary = header.metadata.get("llama.rope.dimension_count", head_dim)
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if rotary != head_dim or kind not in ("none", "linear"):
        raise model_path_error(
            f"{header.file} has rotary scaling {kind!r} over {rotary} of {head_dim} dimensions; supported: "
            "none or linear, over all dimensions",
            reason="ARCHITECTURE_UNSUPPORTED",
        )
    if factors := _rope_factors(header):
        return {"rope_type": "frequency_factors", "factors": factors}
    if kind == "linear":
        return {"rope_type": "linear", "factor": _single(header.metadata["llama.rope.scaling.factor"])}
    return None


def _rope_factors(header: GgufHeader) -> list[float]:
    for tensor in header.tensors:
        if tensor.name == _ROPE_FACTORS:
            nbytes = stored_bytes(tensor.name, tensor.shape, tensor.encoding, file=header.file)
            with header.file.open("rb") as stream:
                stream.seek(tensor.offset)
                stored = stream.read(nbytes)
            return [_single(value) for (value,) in struct.iter_unpack("<f", stored)]
    return []


def read_weight_index(header: GgufHeader, config: dict[str, Any]) -> WeightIndex:
    """The GGUF's tensors under their Hugging Face names.

    Raises:
        InvalidArgument: (model_path) a tensor that a Llama does not have, or an encoding that we do not read.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, TensorEntry] = {}
    for tensor in header.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        tensors[_hugging_face_name(header, tensor)] = TensorEntry(
            file=header.file,
            offset=tensor.offset,
            nbytes=stored_bytes(tensor.name, tensor.shape, tensor.encoding, file=header.file),
            shape=tensor.shape,
            encoding=tensor.encoding,
            rope_permuted_heads=heads.get(tensor.name.split(".")[-2]),
        )
    return WeightIndex(tensors)


def _hugging_face_name(header: GgufHeader, tensor: GgufTensor) -> str:
    match tensor.name.split("."):
        case [stem, suffix] if stem in _MODEL_NAMES:
            return f"{_MODEL_NAMES[stem]}.{suffix}"
        case ["blk", layer, stem, suffix] if stem in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{suffix}"
    raise model_path_error(
        f"{header.file} holds tensor {tensor.name}, which a Llama model does not have",
        reason="ARCHITECTURE_UNSUPPORTED",
    )
