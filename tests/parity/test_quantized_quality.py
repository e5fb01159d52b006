"""What quantisation costs a real model: perplexity of SmolLM2 over a text in the public domain, each format
and cache within its bound of float32. The figures are in docs/models.md; `--log-cli-level=INFO` shows them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.runner import LoadOptions, PrefillRow, StepBatch
from tests.parity.paths import silent
from tests.parity.quantized_files import FORMATS, Array, Format, quantize, save
from worker_svc.layers.step_tensors import build_step
from worker_svc.model_building import PlannedModel, allocate_pages, plan_model
from worker_svc.models.architecture import Model
from worker_svc.weights import WeightReader

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

TEXT = Path(__file__).parents[1] / "data" / "public_domain_prose.txt"
PASSAGE = 256
"""Tokens of a sequence; each is judged from its second token on."""
PAGE = 16


@dataclass(frozen=True)
class Side:
    """One way to run the model, and by which factor its perplexity may exceed that of float32."""

    bound: float
    options: Mapping[str, Any]
    form: Format | None = None


def _in_groups_of(size: int, form: Format) -> Format:
    config = {**form.config, "group_size": size}
    return replace(form, config=config, group=size)


SIDES: dict[str, Side] = {
    "w8a8": Side(1.08, {"quantization": "w8a8"}),
    "w4a16": Side(1.45, {"quantization": "w4a16"}),
    "awq": Side(1.4, {}, _in_groups_of(64, FORMATS["awq-rows"])),
    "gptq": Side(1.65, {}, _in_groups_of(64, FORMATS["gptq"])),
    "compressed-tensors w4a16": Side(1.35, {}, FORMATS["packed-zeros"]),
    "compressed-tensors w8a8": Side(1.08, {}, FORMATS["integers"]),
    "fp8_e4m3 cache": Side(1.02, {"kv_cache_dtype": "fp8_e4m3"}),
    "fp8_e5m2 cache": Side(1.06, {"kv_cache_dtype": "fp8_e5m2"}),
}

SCALED_BOUND = 1.02
"""Of caches with measured scales."""


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    try:
        return open_model("smollm2-135m", cache_dir=default_cache_dir())
    except InvalidArgument as error:
        pytest.skip(f"{error.message} (scripts/test.sh does so)")


@pytest.fixture(scope="module")
def passages(folder: ModelFolder) -> list[list[int]]:
    tokens = Tokenizer.from_file(str(folder.tokenizer_file)).encode(TEXT.read_text(encoding="utf-8")).ids
    assert len(tokens) > 4 * PASSAGE
    return [tokens[start : start + PASSAGE] for start in range(0, len(tokens), PASSAGE)]


@pytest.fixture(scope="module")
def plain(folder: ModelFolder) -> dict[str, Array]:
    """The model's tensors as floats."""
    assert folder.weights is not None
    reader = WeightReader(folder.weights)
    return {name: reader.read(name).numpy() for name in reader.names()}


@pytest.fixture(scope="module")
def baseline(passages: list[list[int]]) -> float:
    return perplexity(_plan("smollm2-135m"), passages)


@pytest.mark.parametrize("name", SIDES)
def test_perplexity_stays_within_the_bound(
    name: str,
    folder: ModelFolder,
    plain: dict[str, Array],
    baseline: float,
    passages: list[list[int]],
    tmp_path: Path,
) -> None:
    side = SIDES[name]
    path = "smollm2-135m"
    if side.form is not None:
        config = _saved_config(folder)
        stored, _ = quantize(plain, side.form)
        path = str(
            save(tmp_path / "model", stored, {**config, "quantization_config": dict(side.form.config)})
        )
    found = perplexity(_plan(path, **side.options), passages)
    log.info(
        "%s: perplexity %.4f, float32 %.4f, %+.2f %%", name, found, baseline, 100 * (found / baseline - 1)
    )
    assert found <= side.bound * baseline
    # Rounding that costs nothing at all was none.
    assert found != baseline


def _plan(path: str, **options: Any) -> PlannedModel:
    backend = CpuBackend(CpuOptions(kernel="off"))
    return plan_model(backend, LoadOptions(path, dtype="float32", **options), silent)


@torch.no_grad()
def run_passage(
    planned: PlannedModel, model: Model, tokens: Sequence[int]
) -> tuple[Tensor, Sequence[Tensor]]:
    """(logits [tokens, vocab], the layers' caches) of one pass."""
    pages = -(-PASSAGE // PAGE)
    sizes: dict[str, Any] = {"page_count": pages, "page_size": PAGE, "device": 0}
    dtype: str = planned.plan.kv_cache_dtype.value
    _, layers = allocate_pages(planned.backend, model.kv_shape, dtype=dtype, **sizes)
    table = np.arange(pages, dtype=np.int32)
    step = build_step(
        StepBatch(
            decode=None, prefill=[PrefillRow(0, 0, np.array(tokens, dtype=np.int32), table, samples=True)]
        ),
        np.empty(0, dtype=np.int64),
        page_size=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return model.logits(model.forward(step, layers)), layers


def perplexity(planned: PlannedModel, passages: Sequence[Sequence[int]]) -> float:
    """exp of the mean of -log p over all tokens but the first of each passage."""
    model = planned.build(planned.operators, silent)
    losses: list[Tensor] = []
    for tokens in passages:
        logits = run_passage(planned, model, tokens)[0][:-1]
        wanted = torch.tensor(tokens[1:]).unsqueeze(1)
        losses.append(-logits.double().log_softmax(dim=-1).gather(1, wanted).flatten())
    return math.exp(float(torch.cat(losses).mean()))


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_a_cache_with_the_checkpoints_scales_stays_within_the_bound(
    name: str,
    folder: ModelFolder,
    plain: dict[str, Array],
    baseline: float,
    passages: list[list[int]],
    tmp_path: Path,
) -> None:
    """Scales of the largest key and value in the first passage, as a calibration would write them."""
    planned = _plan("smollm2-135m")
    _, layers = run_passage(planned, planned.build(planned.operators, silent), passages[0])
    largest = 127.0 if name == "int8" else 448.0
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": np.array(
            [float(cache[index].abs().max()) / largest], dtype=np.float32
        )
        for layer, cache in enumerate(layers)
        for index, part in enumerate("kv")
    }
    scheme = {"num_bits": 8, "type": "int" if name == "int8" else "float", "symmetric": True}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    config = {**_saved_config(folder), "quantization_config": quantization}
    path = save(tmp_path / "model", {**plain, **scales}, config)
    found = perplexity(_plan(str(path), kv_cache_dtype=name), passages)
    log.info("%s with scales: perplexity %.4f, float32 %.4f, %+.2f %%", name, found, baseline,
             100 * (found / baseline - 1))  # fmt: skip
    assert baseline != found <= SCALED_BOUND * baseline


def _saved_config(folder: ModelFolder) -> dict[str, Any]:
    """config.json, without what completing it has added in forms that it does not have."""
    added = ("layer_types", "layer_windows", "rms_norm_offset")
    return {key: value for key, value in folder.config.items() if key not in added}
