"""`quantization_config` of every format comes down to one scheme, or is refused by field and value."""

from __future__ import annotations

from typing import Any

import pytest

from meshkit.errors import InvalidArgument
from meshkit.modelstore.checkpoint_quantization import (
    check_asked,
    find_matrices,
    integer_tensors,
    read_quantization,
    stored_shapes,
)
from meshkit.modelstore.layouts import complete_config, tensor_shapes

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FIRST = "model.layers.0.self_attn.q_proj"


def packed(**weights: Any) -> dict[str, Any]:
    arguments = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": arguments}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def integers(weights: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, **(inputs or {})}
    arguments = {"num_bits": 8, "type": "int", "strategy": "channel", **(weights or {})}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["re:.*down_proj", "lm_head"],
        "config_groups": {"group_0": group},
    }


def complete(quantization: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return complete_config({**MODEL, "quantization_config": quantization, **changes}, source="a folder")


def stored(quantization: dict[str, Any], **changes: Any) -> dict[str, tuple[int, ...]]:
    config = complete(quantization, **changes)
    return stored_shapes(config, tensor_shapes(config))


def of(matrix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {
        name.removeprefix(f"{matrix}."): size
        for name, size in shapes.items()
        if name.startswith(f"{matrix}.")
    }


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        (AWQ, {"qweight": (64, 8), "qzeros": (2, 8), "scales": (2, 64)}),
        (GPTQ, {"qweight": (8, 64), "qzeros": (2, 8), "scales": (2, 64)}),
        (
            {**GPTQ, "desc_act": True},
            {"qweight": (8, 64), "qzeros": (2, 8), "scales": (2, 64), "g_idx": (64,)},
        ),
        (packed(), {"weight_packed": (64, 8), "weight_scale": (64, 2)}),
        (
            packed(symmetric=False, actorder="group"),
            {
                "weight_packed": (64, 8),
                "weight_scale": (64, 2),
                "weight_zero_point": (8, 2),
                "weight_g_idx": (64,),
            },
        ),
        (integers(), {"weight": (64, 64), "weight_scale": (64, 1)}),
        (integers({"strategy": "tensor"}), {"weight": (64, 64), "weight_scale": (1,)}),
    ],
)
def test_a_matrix_is_looked_for_under_the_formats_names(
    quantization: dict[str, Any], wanted: dict[str, tuple[int, ...]]
) -> None:
    assert of(FIRST, stored(quantization)) == wanted


@pytest.mark.parametrize("quantization", [AWQ, GPTQ, packed(), integers()])
def test_embedding_head_and_norms_stay_plain(quantization: dict[str, Any]) -> None:
    shapes = stored(quantization)
    plain = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    assert all(shapes[name] == tensor_shapes(complete(None))[name] for name in plain)


@pytest.mark.parametrize("quantization", [AWQ, GPTQ])
def test_routers_and_gates_of_shared_experts_stay_plain(quantization: dict[str, Any]) -> None:
    mixture = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_key_value_heads": 4,
    }
    shapes = stored(quantization, **mixture)
    assert {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.shared_expert_gate.weight"} <= shapes.keys()
    assert "qweight" in of("model.layers.0.mlp.experts.3.down_proj", shapes)
    assert "qweight" in of("model.layers.0.mlp.shared_expert.up_proj", shapes)


@pytest.mark.parametrize(
    "quantization",
    [
        {**AWQ, "modules_to_not_convert": ["self_attn.q_proj"]},
        {**GPTQ, "dynamic": {r"-:.*\.q_proj": {}}},
        {**GPTQ, "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]]},
        {**packed(), "ignore": [r"re:.*q_proj$", "lm_head"]},
        {**packed(), "ignore": [FIRST, "model.layers.1.self_attn.q_proj", "lm_head"]},
    ],
)
def test_what_a_configuration_leaves_out_stays_plain(quantization: dict[str, Any]) -> None:
    shapes = stored(quantization)
    assert of(FIRST, shapes) == {"weight": (64, 64)}
    assert "weight" not in of("model.layers.0.self_attn.k_proj", shapes)


def test_what_the_files_hold_goes_before_patterns() -> None:
    config = complete(AWQ)
    quantization = read_quantization(config)
    assert quantization is not None
    held = find_matrices(quantization, [f"{FIRST}.qweight", f"{FIRST}.scales"], tensor_shapes(config))
    assert held == [FIRST]
    config["quantized_matrices"] = held
    shapes = stored_shapes(config, tensor_shapes(config))
    assert "qweight" in of(FIRST, shapes)
    assert of("model.layers.0.self_attn.k_proj", shapes) == {"weight": (64, 64)}
    assert f"{FIRST}.qweight" in integer_tensors(config, tensor_shapes(config))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "fp8"}, "'fp8'.*supported: awq, gptq, compressed-tensors"),
        ("awq", "'awq'.*is not supported"),
        ({**AWQ, "bits": 8}, "quantization_config.bits of a folder is 8; supported: 4"),
        ({**AWQ, "version": "gemv"}, "version.*'gemv'; supported: 'gemm'"),
        ({**AWQ, "zero_point": False}, "zero_point.*False; supported: True"),
        ({**GPTQ, "bits": 3}, "bits of a folder is 3; supported: 4"),
        ({"quant_method": "gptq"}, "bits of a folder is None; supported: 4"),
        ({**GPTQ, "group_size": 0}, "group_size.*is 0; supported: -1 or a positive integer"),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            "checkpoint_format.*'marlin'; supported: 'gptq', 'gptq_v2'",
        ),
        ({**GPTQ, "dynamic": {r"+:.*down_proj": {"bits": 8}}}, r"dynamic.*supported: patterns that leave"),
        (packed(num_bits=3), r"config_groups.group_0.weights.num_bits.*is 3; supported: 4"),
        (packed(num_bits=8), r"weights.num_bits.*is 8; supported: 4"),
        (packed(type="float"), r"weights.type.*'float'; supported: 'int'"),
        (packed(actorder="other"), r"weights.actorder.*'other'"),
        (integers(inputs={"dynamic": False}), r"input_activations.dynamic.*False; supported: True"),
        (integers(inputs={"symmetric": False}), r"input_activations.symmetric.*False; supported: True"),
        (
            integers(inputs={"strategy": "tensor"}),
            r"input_activations.strategy.*'tensor'; supported: 'token'",
        ),
        (integers({"symmetric": False}), r"weights.symmetric.*False; supported: True"),
        ({**packed(), "format": "float-quantized"}, r"format.*'float-quantized'; supported: pack-quantized"),
        ({**packed(), "config_groups": {}}, r"config_groups.*\[\]; supported: one group"),
        ({**packed(), "sparsity_config": {"format": "marlin-24"}}, r"sparsity_config.format.*'marlin-24'"),
        ({**packed(), "transform_config": {"R1": {}}}, r"transform_config.*supported: none"),
    ],
)
def test_what_no_operator_expresses_is_refused_by_field_and_value(quantization: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        complete(quantization)
    assert caught.value.field == "model_path"
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


def test_eight_bit_weights_without_eight_bit_activations_are_refused() -> None:
    quantization = integers()
    del quantization["config_groups"]["group_0"]["input_activations"]
    with pytest.raises(InvalidArgument, match=r"input_activations.*W8A16 has no operator"):
        complete(quantization)


def test_a_size_that_groups_do_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidArgument, match=r"down_proj of 64 outputs and 96 columns.*group_size 64"):
        stored({**GPTQ, "group_size": 64})


def test_another_quantization_than_the_checkpoint_has_is_refused() -> None:
    quantization = read_quantization(complete(AWQ))
    for asked in ("", "w4a16", "awq"):
        check_asked(asked, quantization)
    with pytest.raises(InvalidArgument, match="leave quantization out, or name w4a16 or awq") as caught:
        check_asked("w8a8", quantization)
    assert (caught.value.field, caught.value.reason) == ("quantization", "ALREADY_QUANTIZED")
    check_asked("w8a8", None)
