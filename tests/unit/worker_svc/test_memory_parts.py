"""What a rank takes of its chip: weights and cells to the byte of a load, activations as a step has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from meshkit.modelstore import SUPPORTED_ARCHITECTURES, default_cache_dir, open_model, tensor_shapes
from meshkit.modelstore.checkpoint_quantization import read_quantization
from meshkit.modelstore.layouts import complete_config
from meshkit.modelstore.sharding import ALONE, ParallelLayout, RankPlace
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.runner import LoadedModel, LoadOptions
from tests.unit.models.step_driver import StepDriver, sampled
from tests.unit.models.tiny_llama import write_model
from worker_svc.call_sites import SiteRecorder
from worker_svc.layers import quantization
from worker_svc.layers.quantization import QuantizationPolicy
from worker_svc.memory_parts import (
    GROUP_SIZES,
    ModelForm,
    activation_bytes,
    kv_bytes_per_token,
    program_weight_bytes,
    weight_bytes,
)
from worker_svc.model_runner import OperatorModelRunner
from worker_svc.models.architecture import Model, ModelContext
from worker_svc.models.registry import find_architecture
from worker_svc.parallel.links import NoLinks
from worker_svc.weights import ShapesOnly
from worker_svc.weights.parts import RankWeights

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {"architectures": [name]} for name in SUPPORTED_ARCHITECTURES},
    "llama-biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 12},
    "qwen3-tied": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    # 24 columns: no group of w4a16 divides them, so that such matrices stay plain.
    "llama-odd": {"intermediate_size": 24},
    "qwen2-moe-dense-layer": {"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": [1]},
    "qwen3-moe-odd": {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 24},
}


def write(folder: Path, family: str, **changes: Any) -> Path:
    return write_model(folder / family, **{**SIZES, **FAMILIES[family], **changes})


def config_of(folder: Path) -> dict[str, Any]:
    return open_model(str(folder), cache_dir=default_cache_dir(), need_weights=False).config


def silent(stage: str, share: float) -> None:
    """Progress that nobody watches."""


def load(folder: Path, *, kernel: str = "off", **options: Any) -> LoadedModel:
    runner = OperatorModelRunner(CpuBackend(CpuOptions(threads=1, kernel=kernel)))
    return runner.load(LoadOptions(str(folder), **options), silent)


def built(config: dict[str, Any], place: RankPlace, *, dtype: str, asked: str = "") -> Model:
    """A rank's model on tensors without values."""
    _, factory = find_architecture(config)
    return factory(
        ModelContext(
            config=config,
            source=RankWeights(ShapesOnly(config), config, place),
            operators=SiteRecorder(),
            dtype=getattr(torch, dtype),
            device=torch.device("meta"),
            progress=lambda share: None,
            policy=QuantizationPolicy.of_model(asked, config),
            links=NoLinks(place),
        )
    )


@pytest.mark.parametrize("asked", ["", "w8a8", "w4a16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_cells_are_to_the_byte_what_a_load_reports(
    tmp_path: Path, family: str, asked: str
) -> None:
    folder = write(tmp_path, family)
    dtype = "bfloat16" if asked == "" else "float32"
    loaded = load(folder, load_format="dummy", dtype=dtype, quantization=asked)
    config = config_of(folder)
    assert weight_bytes(config, ALONE, ModelForm(dtype, dtype, asked)) == loaded.weight_bytes
    assert kv_bytes_per_token(config, ALONE, dtype) == loaded.kv_bytes_per_token


@pytest.mark.parametrize(
    ("asked", "layout"),
    [("", ParallelLayout(4, 3)), ("w8a8", ParallelLayout(2, 1)), ("w4a16", ParallelLayout(2, 2))],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_ranks_weights_and_cells_are_what_its_part_of_the_model_holds(
    family: str, asked: str, layout: ParallelLayout
) -> None:
    document = {"architectures": ["LlamaForCausalLM"], **SIZES, **FAMILIES[family]}
    config = complete_config(document, source="test")
    for rank in range(layout.world_size):
        place = layout.place(rank)
        model = built(config, place, dtype="bfloat16", asked=asked)
        assert weight_bytes(config, place, ModelForm("bfloat16", "bfloat16", asked)) == model.weight_bytes
        cells = model.kv_shape.values_per_token
        assert kv_bytes_per_token(config, place, "bfloat16") == 2 * cells


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq-ordered": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "gptq-whole-rows": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False},
    "compressed-w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head", "re:.*gate$"],
    },
}


DENSE, MIXTURE = "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    ("checkpoint", "architecture", "layout"),
    [
        ("awq", DENSE, ParallelLayout(1, 1)),
        ("awq", MIXTURE, ParallelLayout(2, 3)),
        ("gptq-ordered", DENSE, ParallelLayout(1, 3)),
        ("gptq-whole-rows", DENSE, ParallelLayout(2, 1)),
        ("gptq-whole-rows", MIXTURE, ParallelLayout(1, 1)),
        ("compressed-w8a8", DENSE, ParallelLayout(2, 1)),
        ("compressed-w8a8", MIXTURE, ParallelLayout(2, 1)),
    ],
)
def test_a_checkpoint_that_is_quantised_takes_what_its_format_takes(
    checkpoint: str, architecture: str, layout: ParallelLayout
) -> None:
    document = {
        **SIZES, "architectures": [architecture], "quantization_config": CHECKPOINTS[checkpoint],
    }  # fmt: skip
    config = complete_config(document, source="test")
    form = ModelForm("bfloat16", "bfloat16", checkpoint=read_quantization(config))
    for rank in range(layout.world_size):
        place = layout.place(rank)
        assert weight_bytes(config, place, form) == built(config, place, dtype="bfloat16").weight_bytes


def test_group_sizes_are_those_of_the_policy() -> None:
    assert GROUP_SIZES == quantization._GROUP_SIZES


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float16")]
)
def test_a_step_programs_weights_are_to_the_byte_what_a_load_reports(
    tmp_path: Path, dtypes: tuple[str, str], tied: bool
) -> None:
    """dtypes: of the files, of all tensors and of key projections: one product is then decoded."""
    folder = write(tmp_path, "LlamaForCausalLM", tie_word_embeddings=tied, attention_bias=True)
    config = config_of(folder)
    save_file(
        {
            name: torch.zeros(shape, dtype=getattr(torch, dtypes["k_proj" in name]))
            for name, shape in tensor_shapes(config).items()
        },
        folder / "model.safetensors",
    )
    program = CpuBackend(CpuOptions(threads=1)).capabilities().step_programs[0]
    if program.reason:
        pytest.skip(program.reason)
    weights = open_model(str(folder), cache_dir=default_cache_dir()).weights
    assert weights is not None
    counted = program_weight_bytes(
        config, lambda name: weights.tensors[name].encoding, taken=frozenset(program.encodings)
    )
    assert counted == load(folder, kernel="auto", dtype="float32").weight_bytes


def measured_peak(folder: Path, trace: Path, *, dtype: str, rows: int, window: int) -> int:
    """Most bytes at once in a step of `window` random decode rows and a chunk, on the cpu plugin."""
    runner = OperatorModelRunner(CpuBackend(CpuOptions(threads=1, kernel="off")))
    runner.load(LoadOptions(str(folder), load_format="dummy", dtype=dtype), silent)
    runner.allocate_kv_cache(page_count=200, page_size=16, max_slots=window + 1)
    driver = StepDriver(runner, page_count=200, page_size=16)
    decoding = [
        driver.admit(slot, [1, 2, slot + 3], room=4, settings=sampled(slot)) for slot in range(window)
    ]
    driver.step([], [(request, 3) for request in decoding])
    chunk = rows - window
    long = driver.admit(window, [7 * index % 100 for index in range(chunk + 1)], room=4)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        driver.step(decoding, [(long, chunk)])
    profiled.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    totals: list[int] = [each["args"]["Total Allocated"] for each in events if each.get("name") == "[memory]"]
    return max(totals) - min(totals[0], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "window", "least"),
    [(516, 4, 0.97), (80, 64, 0.8)],
    ids=["a layer of a long chunk is the widest", "drawing tokens is the widest"],
)
def test_activations_are_what_a_step_has_at_once(
    tmp_path: Path, dtype: str, rows: int, window: int, least: float
) -> None:
    """Never more than counted, but for index tensors; least: share of the count that is surely reached."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32, "vocab_size": 2000}
    folder = write_model(tmp_path / "model", **{**SIZES, **sizes, "max_position_embeddings": 1024})
    config = config_of(folder)
    peak = measured_peak(folder, tmp_path / "trace.json", dtype=dtype, rows=rows, window=window)
    tables = 1024 * 32 * 4
    counted = activation_bytes(config, ALONE, dtype, rows=rows, window=window) - tables
    assert least * counted <= peak <= 1.02 * counted


def test_fewer_ranks_layers_or_rows_never_need_less_than_more() -> None:
    config = complete_config({"architectures": ["Qwen3MoeForCausalLM"], **SIZES}, source="test")

    def of(layout: ParallelLayout, rows: int = 64) -> int:
        return activation_bytes(config, layout.place(0), "bfloat16", rows=rows, window=0)

    assert of(ParallelLayout(1, 1), 64) < of(ParallelLayout(1, 1), 65)
    # What is sent between stages comes on top.
    assert of(ParallelLayout(1, 2)) == of(ParallelLayout(1, 1)) + 64 * 2 * 64 * 2
