"""A KV cache in 8 bits: keys and values are rounded as they are written, by scales of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshkit.errors import FailedPrecondition
from meshkit.modelstore import open_model
from plugins.cpu.memory import CpuMemory
from plugins.cpu.operators import CpuOperators
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import LoadedModel, LoadOptions
from tests.unit.models.step_driver import StepDriver
from tests.unit.models.tiny_llama import write_model
from worker_svc.kv_scales import read_kv_scales
from worker_svc.model_building import plan_model
from worker_svc.model_runner import OperatorModelRunner
from worker_svc.weights import DummyWeights

PROMPTS = ([5, 9, 12, 77, 3, 41, 8, 60, 2, 19], [4, 88, 90], [33] * 21)
MADE = 24
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
KEYS, VALUES = 0.011, 0.007
"""Scales, such that some cells are beyond what int8 holds."""


def rounded(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What comes back out of a cell of `dtype`, by the contract's words."""
    cells = values / scale
    if dtype == torch.int8:
        return cells.round().clamp(-127, 127) * scale
    limit = torch.finfo(dtype).max
    return cells.clamp(-limit, limit).to(dtype).float() * scale


class RoundingOperators(CpuOperators):
    """Rounds what it writes to a cache in float32."""

    def __init__(self, dtype: torch.dtype, scales: tuple[float, float]) -> None:
        super().__init__(CpuMemory())
        self._dtype, self._scales = dtype, scales

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        key, value = (
            rounded(part, self._dtype, scale) for part, scale in zip((key, value), self._scales, strict=True)
        )
        super().write_kv(key, value, kv_cache, cells)


class RoundingBackend(CpuBackend):
    """The chip with those operators."""

    def __init__(self, dtype: torch.dtype, scales: tuple[float, float]) -> None:
        super().__init__(CpuOptions(threads=1, kernel="off"))
        self._rounding = RoundingOperators(dtype, scales)

    @property
    def operators(self) -> OperatorSet | None:
        return self._rounding


def write_weights(folder: Path, scales: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """A tiny Llama with weights that make keys and values of about 1, and what `scales` adds by name."""
    write_model(folder, **changes)
    model = open_model(str(folder), cache_dir=folder / "cache", need_weights=False)
    dummy = DummyWeights(model.config)
    tensors = {name: dummy.read(name) for name in dummy.names()}
    for name in tensors:
        if "_proj" in name or "embed" in name:
            tensors[name] *= 8
    tensors |= {name: torch.tensor(value) for name, value in (scales or {}).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def scales_of(*, keys: float = KEYS, values: float = VALUES, layers: int = 2) -> dict[str, float]:
    prefixes = [f"model.layers.{layer}.self_attn" for layer in range(layers)]
    return {
        f"{prefix}.{name}": value
        for prefix in prefixes
        for name, value in (("k_scale", keys), ("v_scale", values))
    }


def load(
    folder: Path, backend: CpuBackend | None = None, **options: Any
) -> tuple[OperatorModelRunner, LoadedModel]:
    runner = OperatorModelRunner(backend or CpuBackend(CpuOptions(threads=1, kernel="off")))
    return runner, runner.load(
        LoadOptions(str(folder), dtype="float32", **options), lambda stage, share: None
    )


def run(folder: Path, backend: CpuBackend | None = None, **options: Any) -> tuple[LoadedModel, list[Any]]:
    """What the runner says of the model, and tokens of prompts in one batch, in chunks."""
    runner, loaded = load(folder, backend, **options)
    runner.allocate_kv_cache(page_count=60, page_size=8, max_slots=4)
    driver = StepDriver(runner, page_count=60, page_size=8)
    sequences = [driver.admit(slot, prompt, room=MADE) for slot, prompt in enumerate(PROMPTS)]
    driver.run(sequences, MADE, chunk=8)
    return loaded, [sequence.made for sequence in sequences]


def scheme(kind: str, **changes: Any) -> dict[str, Any]:
    """quantization_config of plain weights with scales for a cache."""
    described = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "tensor", **changes}
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": described}


def scales_for(name: str) -> dict[str, Any]:
    return scheme("int" if name == "int8" else "float")


@pytest.mark.parametrize("name", DTYPES)
def test_tokens_are_those_of_a_cache_in_float32_whose_cells_were_rounded(tmp_path: Path, name: str) -> None:
    folder = write_weights(tmp_path, scales_of(), quantization_config=scales_for(name))
    loaded, made = run(folder, kv_cache_dtype=name)
    assert made == run(folder, RoundingBackend(DTYPES[name], (KEYS, VALUES)))[1]
    plain, untouched = run(folder)
    assert made != untouched, "rounding that changes no token shows nothing"
    assert loaded.kv_bytes_per_token * 4 == plain.kv_bytes_per_token


@pytest.mark.parametrize("window", [6, None])
def test_a_window_sees_the_same_cells(tmp_path: Path, window: int | None) -> None:
    """The bounded operators read such a cache, too."""
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    folder = write_weights(tmp_path, scales_of(), **changes)
    made = run(folder, kv_cache_dtype="fp8_e4m3")[1]
    assert made == run(folder, RoundingBackend(torch.float8_e4m3fn, (KEYS, VALUES)))[1]


def test_fp8_without_scales_stores_keys_and_values_as_they_are(tmp_path: Path) -> None:
    folder = write_weights(tmp_path)
    loaded, made = run(folder, kv_cache_dtype="fp8_e4m3")
    assert made == run(folder, RoundingBackend(torch.float8_e4m3fn, (1.0, 1.0)))[1]
    assert loaded.kv_layout == run(folder)[0].kv_layout
    assert loaded.numeric_class == "float32+kv-float8_e4m3fn"


def test_scales_are_part_of_who_a_cache_is(tmp_path: Path) -> None:
    """Two checkpoints that differ by one scale have caches that are not each other's."""
    folders = [
        write_weights(tmp_path / str(number), scales_of(keys=keys))
        for number, keys in enumerate((KEYS, KEYS, 2 * KEYS))
    ]
    layouts = [load(folder, kv_cache_dtype="fp8_e4m3")[1].kv_layout for folder in folders]
    assert "+scales-" not in load(folders[0])[1].kv_layout, "a cache in float32 has no scales"
    assert layouts[0] == layouts[1] != layouts[2]
    assert "+scales-" in layouts[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale", "self_attn.kv_scale"),
    ],
)
def test_scales_are_found_under_each_name_that_checkpoints_give_them(
    tmp_path: Path, key: str, value: str
) -> None:
    scales = {f"model.layers.{layer}.{name}": [0.5 + layer] for layer in (0, 1) for name in (key, value)}
    model = open_model(str(write_weights(tmp_path, scales)), cache_dir=tmp_path / "cache")
    found = read_kv_scales(model.config, model.weights, "float8_e4m3fn")
    assert [found.of(layer) for layer in (0, 1, 2)] == [(0.5, 0.5), (1.5, 1.5), (1.0, 1.0)]


@pytest.mark.parametrize(
    ("name", "scales", "config", "words"),
    [
        ("int8", {}, None, "no k_scale and v_scale"),
        ("int8", scales_of(), None, "cells of type 'float'"),
        ("fp8_e4m3", scales_of(), scheme("int"), "cells of type 'int'"),
        ("fp8_e4m3", scales_of(layers=1), None, "1 of 2 layers"),
        ("fp8_e4m3", scales_of(keys=0.0), None, "k_scale holds 1 values, the first 0;"),
        ("fp8_e4m3", {**scales_of(), "model.layers.1.self_attn.v_scale": [1.0, 2.0]}, None, "holds 2 values"),
        ("fp8_e4m3", scales_of(), scheme("float", symmetric=False), "zero points"),
    ],
)
def test_scales_that_do_not_fit_are_refused_with_the_cause(
    tmp_path: Path, name: str, scales: Mapping[str, Any], config: Any, words: str
) -> None:
    folder = write_weights(tmp_path, scales, quantization_config=config)
    with pytest.raises(FailedPrecondition, match=words) as caught:
        run(folder, kv_cache_dtype=name)
    assert (caught.value.field, caught.value.reason) == ("kv_cache_dtype", "KV_SCALES")


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_step_program_does_not_take_it_and_the_plan_says_so(tmp_path: Path, name: str) -> None:
    folder = write_weights(tmp_path, scales_of(), quantization_config=scales_for(name))
    options = LoadOptions(str(folder), dtype="float32", kv_cache_dtype=name)
    planned = plan_model(CpuBackend(CpuOptions(threads=1)), options, lambda stage, share: None)
    assert planned.plan.step_program.value is None
    if "compiler" not in planned.plan.step_program.reason:
        assert "the program caches in float32" in planned.plan.step_program.reason
