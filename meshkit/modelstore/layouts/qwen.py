"""Qwen2 and 2.5 (biases of query, key and value), Qwen3 (norms of query and key), and their mixtures."""

from __future__ import annotations

from typing import Any

from meshkit.modelstore.layouts.family import (
    Config,
    FamilyLayout,
    Shapes,
    attention_shapes,
    gated_shapes,
    norm_shapes,
)
from meshkit.modelstore.layouts.llama import sliding_throughout

_NORMS = ("input_layernorm", "post_attention_layernorm")


def _qwen2_attention(config: Config) -> Shapes:
    return attention_shapes(config, input_bias=config["qkv_bias"])


def _qwen3_attention(config: Config) -> Shapes:
    bias = config["attention_bias"]
    return attention_shapes(config, input_bias=bias, output_bias=bias, head_norms=True)


def _feed_forward(config: Config, layer: int) -> Shapes:
    """Dense, or a router and its experts."""
    if not config["expert_layers"][layer]:
        return gated_shapes(config, "mlp", config["intermediate_size"])
    shapes: Shapes = {"mlp.gate.weight": (config["num_experts"], config["hidden_size"])}
    for expert in range(config["num_experts"]):
        shapes |= gated_shapes(config, f"mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def _qwen2_layer(config: Config, layer: int) -> Shapes:
    del layer
    dense = gated_shapes(config, "mlp", config["intermediate_size"])
    return {**norm_shapes(config, *_NORMS), **_qwen2_attention(config), **dense}


def _qwen3_layer(config: Config, layer: int) -> Shapes:
    del layer
    dense = gated_shapes(config, "mlp", config["intermediate_size"])
    return {**norm_shapes(config, *_NORMS), **_qwen3_attention(config), **dense}


def _qwen2_moe_layer(config: Config, layer: int) -> Shapes:
    shapes = {
        **norm_shapes(config, *_NORMS),
        **_qwen2_attention(config),
        **_feed_forward(config, layer),
    }
    if config["expert_layers"][layer]:
        shapes |= gated_shapes(config, "mlp.shared_expert", config["shared_expert_intermediate_size"])
        shapes["mlp.shared_expert_gate.weight"] = (1, config["hidden_size"])
    return shapes


def _qwen3_moe_layer(config: Config, layer: int) -> Shapes:
    return {**norm_shapes(config, *_NORMS), **_qwen3_attention(config), **_feed_forward(config, layer)}


def _prepare_window(config: dict[str, Any]) -> None:
    """A window that use_sliding_window does not switch on is none."""
    if not config["use_sliding_window"]:
        config["sliding_window"] = None


def _prepare_mixture(config: dict[str, Any]) -> None:
    _prepare_window(config)
    # transformers 5 writes num_local_experts for some of them.
    config["num_experts"] = config.get("num_experts") or config.get("num_local_experts")
    dense = config["mlp_only_layers"] or ()
    step = config["decoder_sparse_step"]
    config["expert_layers"] = [
        # A step of 0 is refused with the other sizes.
        layer not in dense and bool(step) and (layer + 1) % step == 0
        for layer in range(config["num_hidden_layers"])
    ]


def _late_layers(config: Config) -> list[str]:
    first = config["max_window_layers"] if config["sliding_window"] else config["num_hidden_layers"]
    return [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _early_even_layers(config: Config) -> list[str]:
    end = config["max_window_layers"] if config["sliding_window"] else 0
    return [
        "sliding_attention" if layer % 2 == 0 and layer < end else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]


_DEFAULTS = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_MIXTURE_DEFAULTS = {**_DEFAULTS, "mlp_only_layers": (), "decoder_sparse_step": 1, "norm_topk_prob": False}
_MIXTURE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")

QWEN2 = FamilyLayout(
    "Qwen2ForCausalLM",
    _qwen2_layer,
    defaults={**_DEFAULTS, "num_key_value_heads": 32, "qkv_bias": True},
    layer_types=_late_layers,
    prepare=_prepare_window,
)
QWEN3 = FamilyLayout(
    "Qwen3ForCausalLM",
    _qwen3_layer,
    defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    layer_types=_late_layers,
    prepare=_prepare_window,
)
QWEN2_MOE = FamilyLayout(
    "Qwen2MoeForCausalLM",
    _qwen2_moe_layer,
    defaults={
        **_MIXTURE_DEFAULTS,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    sizes=(*_MIXTURE_SIZES, "shared_expert_intermediate_size"),
    layer_types=_early_even_layers,
    prepare=_prepare_mixture,
)
QWEN3_MOE = FamilyLayout(
    "Qwen3MoeForCausalLM",
    _qwen3_moe_layer,
    defaults={
        **_MIXTURE_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "attention_bias": False,
    },
    sizes=_MIXTURE_SIZES,
    layer_types=sliding_throughout,
    prepare=_prepare_mixture,
)
