"""Weights are quantised by one policy, and a quantised model still answers about as the plain one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshkit.errors import InvalidArgument
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.operators import REFERENCE
from plugins.sdk.reference.quantized import dequantize_w4, linear_w4a16, linear_w8a8, quantize_rows
from plugins.sdk.runner import LoadedModel, LoadOptions
from tests.unit.models.tiny_llama import write_model
from worker_svc.layers.quantization import QuantizationPolicy
from worker_svc.model_runner import OperatorModelRunner


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_int8_rows_keep_their_largest_value_and_zeros() -> None:
    x = torch.tensor([[1.0, -4.0, 0.5], [0.0, 0.0, 0.0]])
    values, step = quantize_rows(x)
    assert values.tolist() == [[32, -127, 16], [0, 0, 0]]
    assert step.tolist() == pytest.approx([4 / 127, 0.0])


def test_w8a8_lies_within_the_steps_of_both_sides() -> None:
    x, weight = random(5, 64), random(7, 64, seed=1)
    packed = QuantizationPolicy("w8a8").pack(weight)
    assert packed.operator == "linear_w8a8"
    made = linear_w8a8(x, *packed.tensors.values())
    assert (made - x @ weight.T).abs().max() < 0.02 * (x.abs() @ weight.abs().T).max()


def test_w4a16_lies_within_half_a_level_of_each_weight() -> None:
    x, weight = random(5, 64), random(7, 64, seed=1) + 0.3
    packed = QuantizationPolicy("w4a16").pack(weight)
    assert packed.sizes == {"N": 7, "J": 32, "Q": 1}
    error = (dequantize_w4(*packed.tensors.values()) - weight).abs()
    assert bool((error <= packed.tensors["scale"] * 0.501).all())
    made = linear_w4a16(x, *packed.tensors.values())
    torch.testing.assert_close(made, x @ dequantize_w4(*packed.tensors.values()).T)


def test_groups_are_the_largest_that_divide_and_a_layer_without_one_stays_plain() -> None:
    policy = QuantizationPolicy("w4a16")
    groups = {size: policy.pack(random(4, size)).sizes.get("Q") for size in (256, 576, 96, 40)}
    assert groups == {256: 2, 576: 9, 96: 3, 40: None}
    assert policy.pack(random(4, 40)).operator == "linear"


def test_a_head_stays_plain_and_an_unknown_format_is_refused() -> None:
    assert QuantizationPolicy("w8a8").pack(random(4, 64), plain=True).operator == "linear"
    with pytest.raises(InvalidArgument, match="w8a8, w4a16") as caught:
        QuantizationPolicy("fp4")
    assert caught.value.field == "quantization"


def load(folder: Path, quantization: str) -> LoadedModel:
    runner = OperatorModelRunner(CpuBackend(CpuOptions(threads=1)))
    options = LoadOptions(str(folder), load_format="dummy", quantization=quantization)
    return runner.load(options, lambda stage, share: None)


@pytest.mark.parametrize("quantization", ["w8a8", "w4a16"])
def test_a_quantised_model_is_smaller_and_says_what_it_is(tmp_path: Path, quantization: str) -> None:
    folder = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    plain, packed = load(folder, ""), load(folder, quantization)
    assert packed.weight_bytes < plain.weight_bytes
    assert packed.numeric_class == f"float32+{quantization}"
    assert packed.weights_version != plain.weights_version
    calls = {decision.name: decision.calls for decision in packed.operators}
    assert f"linear_{quantization}" in calls
    assert calls["rotary"] == 2
    assert "qkv_rotary" not in calls


@pytest.mark.parametrize(("quantization", "tolerance"), [("w8a8", 0.03), ("w4a16", 0.25)])
def test_quantised_experts_make_about_what_plain_ones_make(quantization: str, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(5, 2 * 32, 64, generator=generator) / 8
    down = torch.randn(5, 64, 32, generator=generator) / 6
    x = torch.randn(9, 64, generator=generator)
    choice = REFERENCE["moe_route"](torch.randn(9, 5, generator=generator), 2, 1)
    plain = QuantizationPolicy().pack_experts(gate_up, down)
    packed = QuantizationPolicy(quantization).pack_experts(gate_up, down)
    assert packed.operator == f"moe_experts_{quantization}"
    assert packed.nbytes < plain.nbytes / 2
    expected = REFERENCE[plain.operator](x, *plain.tensors.values(), *choice)
    got = REFERENCE[packed.operator](x, *packed.tensors.values(), *choice)
    # A level is a third of a weight's deviation, so 4 bits are off by a tenth in each of three products.
    assert float((got - expected).norm()) < tolerance * float(expected.norm())
    assert (
        CATALOGUE[packed.operator].fixed_symbols
        >= packed.sizes.keys()
        == CATALOGUE[packed.operator].fixed_symbols - {"A"}
    )


def test_experts_that_no_group_divides_stay_plain() -> None:
    packed = QuantizationPolicy("w4a16").pack_experts(torch.ones(2, 80, 64), torch.ones(2, 64, 40))
    assert packed.operator == "moe_experts"
