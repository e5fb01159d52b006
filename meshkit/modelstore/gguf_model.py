"""Translates a GGUF's metadata and tensor names into Hugging Face's config.json and names."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshkit.modelstore.gguf_families import GgufFamily, find_family, supported_kinds
from meshkit.modelstore.gguf_header import GgufHeader, GgufTensor
from meshkit.modelstore.gguf_metadata import Metadata, shortest_single
from meshkit.modelstore.problems import model_path_error
from meshkit.modelstore.weight_index import TensorEntry, WeightIndex, stored_bytes

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Per pair of dimensions, by what its rotary frequency is divided (Llama 3.1 and later); goes into
# config.json.
_ROPE_FACTORS = "rope_freqs.weight"


def require_family(header: GgufHeader) -> GgufFamily:
    """Raise InvalidArgument (model_path) unless the GGUF is of a kind that we run."""
    kind = str(header.metadata.get("general.architecture"))
    family = find_family(Metadata(header, kind))
    if family is None:
        raise model_path_error(
            f"{header.file} is of architecture {kind}; supported GGUF architectures: {supported_kinds()}",
            reason="ARCHITECTURE_UNSUPPORTED",
        )
    return family


def read_config(header: GgufHeader, family: GgufFamily) -> dict[str, Any]:
    """The Hugging Face configuration of a GGUF."""
    metadata = Metadata(header, header.metadata["general.architecture"])
    heads = metadata.integer("attention.head_count")
    hidden = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // heads)
    names = {tensor.name for tensor in header.tensors}
    has_query_bias = any(name.endswith("attn_q.bias") for name in names)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": metadata.prefix,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, head_dim=head_dim),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-6),
        "attention_bias": has_query_bias,
        "qkv_bias": has_query_bias,
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in names),
        "tie_word_embeddings": "output.weight" not in names,
        **family.fields(metadata),
    }
    for word in ("bos", "eos"):
        config[f"{word}_token_id"] = header.metadata.get(f"tokenizer.ggml.{word}_token_id")
    return config


def _vocab_size(header: GgufHeader) -> int:
    # The embedding's rows are what the model can take; a vocabulary may be shorter than its padded embedding.
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise model_path_error(f"{header.file} has no token_embd.weight", reason="TENSOR_MISSING")


def _rope_scaling(metadata: Metadata, *, head_dim: int) -> dict[str, Any] | None:
    rotary = metadata.get("rope.dimension_count", head_dim)
    kind = metadata.get("rope.scaling.type", "none")
    if rotary != head_dim or kind not in ("none", "linear", "yarn"):
        raise model_path_error(
            f"{metadata.header.file} has rotary scaling {kind!r} over {rotary} of {head_dim} dimensions; "
            "supported: none, linear or yarn, over all dimensions",
            reason="ARCHITECTURE_UNSUPPORTED",
        )
    if factors := _rope_factors(metadata.header):
        return {"rope_type": "frequency_factors", "factors": factors}
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
        }
    return None


def _rope_factors(header: GgufHeader) -> list[float]:
    for tensor in header.tensors:
        if tensor.name == _ROPE_FACTORS:
            nbytes = stored_bytes(tensor.name, tensor.shape, tensor.encoding, file=header.file)
            with header.file.open("rb") as stream:
                stream.seek(tensor.offset)
                stored = stream.read(nbytes)
            return [shortest_single(value) for (value,) in struct.iter_unpack("<f", stored)]
    return []


def read_weight_index(header: GgufHeader, config: dict[str, Any], family: GgufFamily) -> WeightIndex:
    """The GGUF's tensors under their Hugging Face names, experts one by one.

    Raises:
        InvalidArgument: (model_path) a tensor that the family does not have, or an encoding that we do not
            read.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, TensorEntry] = {}
    for tensor in header.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        entry = TensorEntry(
            file=header.file,
            offset=tensor.offset,
            nbytes=stored_bytes(tensor.name, tensor.shape, tensor.encoding, file=header.file),
            shape=tensor.shape,
            encoding=tensor.encoding,
            rope_permuted_heads=heads.get(tensor.name.split(".")[-2]) if family.interleaved else None,
        )
        tensors.update(_named(header, tensor, entry, family))
    return WeightIndex(tensors)


def _named(
    header: GgufHeader, tensor: GgufTensor, entry: TensorEntry, family: GgufFamily
) -> Iterator[tuple[str, TensorEntry]]:
    match tensor.name.split("."):
        case [stem, suffix] if stem in _MODEL_NAMES:
            yield f"{_MODEL_NAMES[stem]}.{suffix}", entry
        case ["blk", layer, stem, "weight"] if stem in family.expert_names and len(entry.shape) == 3:
            yield from _by_expert(f"model.layers.{layer}.{family.expert_names[stem]}.weight", entry)
        case ["blk", layer, "ffn_gate_inp_shexp" as stem, suffix] if stem in family.layer_names:
            # Some files hold this one row as a vector.
            row = replace(entry, shape=(1, entry.shape[-1]))
            yield f"model.layers.{layer}.{family.layer_names[stem]}.{suffix}", row
        case ["blk", layer, stem, suffix] if stem in family.layer_names:
            yield f"model.layers.{layer}.{family.layer_names[stem]}.{suffix}", entry
        case _:
            raise model_path_error(
                f"{header.file} holds tensor {tensor.name}, which a {family.architecture} does not have",
                reason="ARCHITECTURE_UNSUPPORTED",
            )


def _by_expert(name: str, stacked: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """Blocks never cross a row, so each expert is a run of bytes."""
    count = stacked.shape[0]
    nbytes = stacked.nbytes // count
    for expert in range(count):
        offset = stacked.offset + expert * nbytes
        yield name.format(expert), replace(stacked, offset=offset, nbytes=nbytes, shape=stacked.shape[1:])
