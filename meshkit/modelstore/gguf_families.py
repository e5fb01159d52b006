"""Families of GGUFs: their names for tensors, and what their metadata say beside what all have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshkit.modelstore.gguf_metadata import Metadata
from meshkit.modelstore.problems import model_path_error

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_TWO_NORMS, **_ATTENTION, **_DENSE}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _nothing(metadata: Metadata) -> dict[str, Any]:
    del metadata
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """What a GGUF of one kind is in Hugging Face's words.

    layer_names: of tensors within a layer. expert_names: of stacked tensors, one for each expert. fields: of
    the configuration, beside those that every family has. interleaved: rows of query and key are in the order
    that llama.cpp's rotary positions want.
    """

    architecture: str
    layer_names: Mapping[str, str]
    expert_names: Mapping[str, str] = field(default_factory=dict)
    fields: Callable[[Metadata], dict[str, Any]] = _nothing
    interleaved: bool = False


def find_family(metadata: Metadata) -> GgufFamily | None:
    """The family of a GGUF, None for one that we do not run. Llama's kind is also Mistral's and Mixtral's."""
    if metadata.prefix != "llama":
        return _FAMILIES.get(metadata.prefix)
    if metadata.get("expert_count"):
        return _MIXTRAL
    return _MISTRAL if metadata.get("attention.sliding_window") else _FAMILIES["llama"]


def supported_kinds() -> str:
    """All of them in words."""
    return ", ".join(f"{kind} ({family.architecture})" for kind, family in _FAMILIES.items())


def _window(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata.get("attention.sliding_window")}


def _mixtral_fields(metadata: Metadata) -> dict[str, Any]:
    chosen = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }
    return {**_window(metadata), **chosen}


def _qwen_mixture_fields(metadata: Metadata, *, renormalize: bool) -> dict[str, Any]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.get("expert_weights_norm", renormalize),
    }


def _qwen2_moe_fields(metadata: Metadata) -> dict[str, Any]:
    dense = metadata.integer("feed_forward_length")
    shared = metadata.integer("expert_shared_feed_forward_length", dense)
    return {**_qwen_mixture_fields(metadata, renormalize=False), "shared_expert_intermediate_size": shared}


def _qwen3_moe_fields(metadata: Metadata) -> dict[str, Any]:
    return _qwen_mixture_fields(metadata, renormalize=True)


def _gemma_fields(metadata: Metadata) -> dict[str, Any]:
    """Weights of norms come with their 1 added. Scores are scaled by the head size, but for the 27B ones,
    which GGUFs tell by their number of layers alone.
    """
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    layers = metadata.integer("block_count")
    is_27b = layers == _GEMMA_27B_LAYERS[metadata.prefix]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_offset": 0.0,
        "query_pre_attn_scalar": hidden // heads if is_27b else metadata.integer("attention.key_length"),
    }


def _layer_types(metadata: Metadata, pattern: int) -> list[str]:
    """Every `pattern`-th layer reaches back all the way."""
    given = metadata.get("attention.sliding_window_pattern", pattern)
    if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
        raise model_path_error(
            f"{metadata.prefix}.attention.sliding_window_pattern of {metadata.header.file} is {given!r}; "
            "supported: a positive integer",
            reason="ARCHITECTURE_UNSUPPORTED",
        )
    return [
        "sliding_attention" if (layer + 1) % given else "full_attention"
        for layer in range(metadata.integer("block_count"))
    ]


def _gemma2_fields(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma_fields(metadata),
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, 2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3_fields(metadata: Metadata) -> dict[str, Any]:
    made = {**_gemma_fields(metadata), "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0)}
    if metadata.get("final_logit_softcapping"):
        made["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    if metadata.get("attention.sliding_window"):
        made["sliding_window"] = metadata.integer("attention.sliding_window")
        made["layer_types"] = _layer_types(metadata, 6)
    else:
        made["layer_types"] = ["full_attention"] * metadata.integer("block_count")
    return made


_MISTRAL = GgufFamily("MistralForCausalLM", _LLAMA, fields=_window, interleaved=True)
_MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    {**_TWO_NORMS, **_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    _MIXTRAL_EXPERTS,
    fields=_mixtral_fields,
    interleaved=True,
)
_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", _LLAMA, interleaved=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", _LLAMA),
    "qwen3": GgufFamily("Qwen3ForCausalLM", {**_LLAMA, **_HEAD_NORMS}),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM",
        {**_LLAMA, **_SHARED_EXPERT, "ffn_gate_inp": "mlp.gate"},
        _QWEN_EXPERTS,
        fields=_qwen2_moe_fields,
    ),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        {**_LLAMA, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        _QWEN_EXPERTS,
        fields=_qwen3_moe_fields,
    ),
    "gemma2": GgufFamily("Gemma2ForCausalLM", {**_FOUR_NORMS, **_ATTENTION, **_DENSE}, fields=_gemma2_fields),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        {**_FOUR_NORMS, **_ATTENTION, **_DENSE, **_HEAD_NORMS},
        fields=_gemma3_fields,
    ),
}
