"""MixtralForCausalLM: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from typing import Any

from meshkit.modelstore.layouts.family import Config, FamilyLayout, Shapes, attention_shapes, norm_shapes
from meshkit.modelstore.layouts.llama import sliding_throughout


def _layer(config: Config, layer: int) -> Shapes:
    del layer
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    block = "block_sparse_moe"
    shapes = {
        **norm_shapes(config, "input_layernorm", "post_attention_layernorm"),
        **attention_shapes(config),
        f"{block}.gate.weight": (config["num_local_experts"], hidden),
    }
    for expert in range(config["num_local_experts"]):
        shapes[f"{block}.experts.{expert}.w1.weight"] = (inner, hidden)
        shapes[f"{block}.experts.{expert}.w3.weight"] = (inner, hidden)
        shapes[f"{block}.experts.{expert}.w2.weight"] = (hidden, inner)
    return shapes


def _prepare(config: dict[str, Any]) -> None:
    config["expert_layers"] = [True] * config["num_hidden_layers"]


MIXTRAL = FamilyLayout(
    "MixtralForCausalLM",
    _layer,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    sizes=("num_experts_per_tok", "num_local_experts"),
    layer_types=sliding_throughout,
    prepare=_prepare,
)
