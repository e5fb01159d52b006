"""Families without weights: load-format dummy, the plan, quantised mixtures, bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshkit.modelstore import SUPPORTED_ARCHITECTURES
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.runner import LoadedModel, LoadOptions
from tests.unit.models.step_driver import StepDriver
from tests.unit.models.tiny_llama import write_model
from worker_svc.model_runner import OperatorModelRunner

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def load(folder: Path, **options: Any) -> tuple[OperatorModelRunner, LoadedModel]:
    runner = OperatorModelRunner(CpuBackend(CpuOptions(threads=1)))
    wanted = LoadOptions(str(folder), load_format="dummy", **options)
    return runner, runner.load(wanted, lambda stage, share: None)


def write(folder: Path, architecture: str, **changes: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, **EXPERTS, **changes}
    return write_model(folder, architectures=[architecture], **sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_family_serves_dummy_weights(tmp_path: Path, architecture: str, dtype: str) -> None:
    folder = write(tmp_path / "model", architecture, sliding_window=6)
    runner, described = load(folder, dtype=dtype)
    assert described.architecture == architecture
    runner.allocate_kv_cache(page_count=20, page_size=4, max_slots=2)
    driver = StepDriver(runner, page_count=20, page_size=4)
    sequences = [driver.admit(0, [5, 9, 60, 22, 7, 11, 90, 33], room=6), driver.admit(1, [3, 8], room=6)]
    made = driver.run(sequences, 6, chunk=3)
    assert all(0 <= token < described.vocab_size for tokens in made for token in tokens)


def calls_of(described: LoadedModel) -> dict[str, str]:
    return {decision.name: decision.choice for decision in described.operators}


def test_the_plan_shows_which_path_serves_a_model(tmp_path: Path) -> None:
    _, open_ended = load(write(tmp_path / "a", "MistralForCausalLM", sliding_window=None), dtype="float32")
    _, windowed = load(write(tmp_path / "b", "MistralForCausalLM", sliding_window=6), dtype="float32")
    assert set(calls_of(open_ended)) == {"llama_step", "argmax", "sample"}
    assert calls_of(windowed)["attention_decode_bounded"] == "native"
    assert "attention_decode" not in calls_of(windowed)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM"])
@pytest.mark.parametrize("quantization", ["w8a8", "w4a16"])
def test_a_mixture_is_quantised_with_its_experts(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    folder = write(tmp_path / "model", architecture)
    _, plain = load(folder)
    _, packed = load(folder, quantization=quantization)
    assert packed.weight_bytes < plain.weight_bytes
    assert f"moe_experts_{quantization}" in calls_of(packed)
    assert "moe_route" in calls_of(packed)
