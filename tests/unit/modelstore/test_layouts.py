"""What configurations of each family mean: their tensors, their windows, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshkit.errors import InvalidArgument
from meshkit.modelstore import SUPPORTED_ARCHITECTURES, tensor_shapes
from meshkit.modelstore.layouts import complete_config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 50,
}


def complete(architecture: str, **fields: Any) -> dict[str, Any]:
    return complete_config({"architectures": [architecture], **SIZES, **fields}, source="test")


def refusal(architecture: str, **fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        complete(architecture, **fields)
    assert caught.value.field == "model_path"
    return caught.value.message


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_family_has_the_parts_that_a_decoder_needs(architecture: str) -> None:
    config = complete(architecture, num_experts=4, num_local_experts=4, num_experts_per_tok=2)
    shapes = tensor_shapes(config)
    for layer in range(4):
        assert shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] == (64, 64)
        assert shapes[f"model.layers.{layer}.self_attn.k_proj.weight"] == (32, 64)
        assert shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] == (64,)
    assert ("lm_head.weight" in shapes) is (not config["tie_word_embeddings"])
    assert len(config["layer_windows"]) == len(config["layer_types"]) == 4


def test_biases_and_head_norms_are_where_each_family_has_them() -> None:
    names = {name: tensor_shapes(complete(name)) for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")}
    qwen2, qwen3 = names.values()
    attention = "model.layers.0.self_attn"
    assert qwen2[f"{attention}.v_proj.bias"] == (32,)
    assert f"{attention}.o_proj.bias" not in qwen2
    assert qwen3[f"{attention}.q_norm.weight"] == (16,)
    assert f"{attention}.q_proj.bias" not in qwen3


def test_a_mixture_may_have_dense_layers_between() -> None:
    changes = {"num_experts": 3, "decoder_sparse_step": 2, "mlp_only_layers": [3], "moe_intermediate_size": 8}
    config = complete("Qwen3MoeForCausalLM", num_experts_per_tok=2, **changes)
    assert config["expert_layers"] == [False, True, False, False]
    shapes = tensor_shapes(config)
    assert shapes["model.layers.1.mlp.experts.2.down_proj.weight"] == (64, 8)
    assert shapes["model.layers.3.mlp.down_proj.weight"] == (64, 96)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {}, [0, 0, 0, 0]),
        ("MistralForCausalLM", {"sliding_window": 9}, [9, 9, 9, 9]),
        ("MistralForCausalLM", {"sliding_window": None}, [0, 0, 0, 0]),
        # As long as the context: no sequence outgrows it.
        ("MistralForCausalLM", {"max_position_embeddings": 4096}, [0, 0, 0, 0]),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "max_window_layers": 1}, [0, 0, 0, 0]),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            [0, 0, 0, 9],
        ),
        ("Gemma2ForCausalLM", {"sliding_window": 9}, [9, 0, 9, 0]),
        ("Gemma3ForCausalLM", {"sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, 0, 9]),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 9, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            [0, 0, 0, 9],
        ),
    ],
)
def test_windows_are_where_each_family_puts_them(
    architecture: str, fields: dict[str, Any], windows: list[int]
) -> None:
    assert complete(architecture, **fields)["layer_windows"] == windows


def test_both_spellings_of_rotary_settings_mean_the_same() -> None:
    older = complete(
        "Gemma3ForCausalLM",
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    newer = complete(
        "Gemma3ForCausalLM",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    fields = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    assert [older[field] for field in fields] == [newer[field] for field in fields]
    assert complete("MixtralForCausalLM")["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        (
            "Gemma2ForCausalLM",
            {"hidden_activation": "silu"},
            ["'silu'", "gelu_pytorch_tanh"],
        ),
        ("Qwen2ForCausalLM", {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (
            "LlamaForCausalLM",
            {"layer_types": ["chunked_attention"] * 4},
            ["chunked_attention", "full_attention"],
        ),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"]}, ["lists 1 layers", "each of 4"]),
        ("MistralForCausalLM", {"sliding_window": -3}, ["sliding_window", "-3"]),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor", "0.5"],
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            ["sliding_attention", "linear"],
        ),
        ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 3}, ["num_experts_per_tok 3"]),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, ["num_experts", "positive integer"]),
        ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 0}, ["decoder_sparse_step", "positive integer"]),
        ("Gemma3ForConditionalGeneration", {}, ["Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"]),
    ],
)
def test_what_we_do_not_run_is_refused_by_field_and_value(
    architecture: str, fields: dict[str, Any], words: list[str]
) -> None:
    message = refusal(architecture, **fields)
    assert all(word in message for word in words), message
