"""Gemma 2 and 3 (text): four norms in a layer, alternating windows, gelu, and weights of norms less 1."""

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

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "rms_norm_offset": 1.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _layer(config: Config, *, head_norms: bool) -> Shapes:
    bias = config["attention_bias"]
    return {
        **norm_shapes(config, *_NORMS),
        **attention_shapes(config, input_bias=bias, output_bias=bias, head_norms=head_norms),
        **gated_shapes(config, "mlp", config["intermediate_size"]),
    }


def _gemma2_layer(config: Config, layer: int) -> Shapes:
    del layer
    return _layer(config, head_norms=False)


def _gemma3_layer(config: Config, layer: int) -> Shapes:
    del layer
    return _layer(config, head_norms=True)


def _full_every(config: Config, pattern: int) -> list[str]:
    return [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _every_second(config: Config) -> list[str]:
    return _full_every(config, 2)


def _every_sixth(config: Config) -> list[str]:
    return _full_every(config, config["sliding_window_pattern"])


GEMMA2 = FamilyLayout(
    "Gemma2ForCausalLM",
    _gemma2_layer,
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    activation="gelu_pytorch_tanh",
    layer_types=_every_second,
)
GEMMA3 = FamilyLayout(
    "Gemma3ForCausalLM",
    _gemma3_layer,
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    activation="gelu_pytorch_tanh",
    layer_types=_every_sixth,
)
