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


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_blends_by_index_between() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    frequencies = 10000.0 ** -(torch.arange(0, 32, dtype=torch.float64) / 32)
    scaled = scale_frequencies(frequencies, scaling) / frequencies
    turns = 1024 * frequencies / (2 * math.pi)
    # The first index that turns less than 32 times, rounded down, and the last that turns once, rounded up.
    low, high = int((turns >= 32).sum()) - 1, int((turns > 1).sum())
    assert scaled[: low + 1].tolist() == [1.0] * (low + 1)
    assert scaled[high:].tolist() == pytest.approx([0.25] * (32 - high))
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    assert float(scaled[middle]) == pytest.approx(1 - share + share / 4)
    table = build_cos_sin(head_dim=64, context=4, theta=1e4, scaling=scaling, device=CPU)
    assert float(table[0, 0]) == pytest.approx(0.1 * math.log(4.0) + 1)


def test_yarn_without_its_trained_context_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="original_max_position_embeddings"):
        scale_frequencies(torch.ones(2), {"rope_type": "yarn", "factor": 4.0})


def test_an_unknown_scaling_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidArgument, match=r"'longrope'.*linear, llama3, yarn") as caught:
        scale_frequencies(torch.ones(2), {"rope_type": "longrope", "factor": 4.0})
    assert caught.value.field == "model_path"


def test_frequency_factors_of_a_gguf_divide_each_frequency() -> None:
    frequencies = torch.tensor([1.0, 0.5], dtype=torch.float64)
    scaled = scale_frequencies(frequencies, {"rope_type": "frequency_factors", "factors": [1.0, 8.0]})
    assert scaled.tolist() == [1.0, 0.0625]
