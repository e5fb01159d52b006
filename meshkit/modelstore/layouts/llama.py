"""LlamaForCausalLM, and MistralForCausalLM, which is one with a sliding window and without biases."""

from __future__ import annotations

from meshkit.modelstore.layouts.family import (
    Config,
    FamilyLayout,
    Shapes,
    attention_shapes,
    gated_shapes,
    norm_shapes,
)


def sliding_throughout(config: Config) -> list[str]:
    """Every layer has the window, where there is one."""
    kind = "sliding_attention" if config["sliding_window"] else "full_attention"
    return [kind] * config["num_hidden_layers"]


def _llama_layer(config: Config, layer: int) -> Shapes:
    del layer
    bias = config["attention_bias"]
    return {
        **norm_shapes(config, "input_layernorm", "post_attention_layernorm"),
        **attention_shapes(config, input_bias=bias, output_bias=bias),
        **gated_shapes(config, "mlp", config["intermediate_size"], bias=config["mlp_bias"]),
    }


def _mistral_layer(config: Config, layer: int) -> Shapes:
    return _llama_layer({**config, "attention_bias": False, "mlp_bias": False}, layer)


LLAMA = FamilyLayout("LlamaForCausalLM", _llama_layer, defaults={"attention_bias": False, "mlp_bias": False})
MISTRAL = FamilyLayout(
    "MistralForCausalLM",
    _mistral_layer,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    layer_types=sliding_throughout,
)
