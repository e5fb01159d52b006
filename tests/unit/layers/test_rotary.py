"""Rotary tables, against the formulas of their papers."""

from __future__ import annotations

import math

import pytest
import torch

from meshkit.errors import InvalidArgument
from worker_svc.layers.rotary import build_cos_sin, scale_frequencies

CPU = torch.device("cpu")
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_table_holds_cosines_then_sines_of_position_times_frequency() -> None:
    table = build_cos_sin(head_dim=4, context=50, theta=100.0, scaling=None, device=CPU)
    assert table.dtype == torch.float32
    wanted = [math.cos(37), math.cos(37 * 0.1), math.sin(37), math.sin(37 * 0.1)]
    assert table[37].tolist() == pytest.approx(wanted, abs=1e-6)


def test_linear_scaling_stretches_positions() -> None:
    plain = build_cos_sin(head_dim=8, context=20, theta=1e4, scaling=None, device=CPU)
    scaled = build_cos_sin(
        head_dim=8, context=20, theta=1e4, scaling={"rope_type": "linear", "factor": 2.0}, device=CPU
    )
    torch.testing.assert_close(scaled[10], plain[5])


def test_llama_3_keeps_short_waves_and_stretches_long_ones() -> None:
    turns = torch.tensor([100.0, 4.0, 2.5, 1.0, 0.1], dtype=torch.float64)
    frequencies = turns * 2 * math.pi / 8192
    scaled = scale_frequencies(frequencies, LLAMA_3) / frequencies
    assert scaled.tolist() == pytest.approx([1.0, 1.0, 0.5 / 8 + 0.5, 1 / 8, 1 / 8])


def test_an_unknown_scaling_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidArgument, match=r"'yarn'.*linear, llama3") as caught:
        scale_frequencies(torch.ones(2), {"rope_type": "yarn", "factor": 4.0})
    assert caught.value.field == "model_path"


def test_frequency_factors_of_a_gguf_divide_each_frequency() -> None:
    frequencies = torch.tensor([1.0, 0.5], dtype=torch.float64)
    scaled = scale_frequencies(frequencies, {"rope_type": "frequency_factors", "factors": [1.0, 8.0]})
    assert scaled.tolist() == [1.0, 0.0625]
