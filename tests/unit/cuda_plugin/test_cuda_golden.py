"""SmolLM2 in float32 on the plugin's operators over torch on the host: greedy tokens of the reference."""

from __future__ import annotations

import pytest

from meshkit.errors import InvalidArgument
from meshkit.modelstore import default_cache_dir, open_model
from plugins.cuda.plugin import CudaBackend
from plugins.sdk.runner import LoadOptions
from tests.support.golden import load_golden
from tests.unit.cuda_plugin.stand_in import runtime_of
from tests.unit.models.step_driver import StepDriver
from worker_svc.model_runner import OperatorModelRunner

MODEL = "smollm2-135m"
TOKENS = 20
"""Of each prompt: across a page border, few enough for a unit test."""


def test_greedy_tokens_are_the_references_with_strict_set() -> None:
    try:
        open_model(MODEL, cache_dir=default_cache_dir())
    except InvalidArgument as error:
        pytest.skip(f"{error.message} (scripts/test.sh does so)")
    runner = OperatorModelRunner(CudaBackend(runtime_of()))
    loaded = runner.load(LoadOptions(MODEL, dtype="float32", strict=True), lambda stage, share: None)
    assert {each.choice for each in loaded.operators} <= {"native", "fused", "decomposed"}
    runner.allocate_kv_cache(page_count=40, page_size=16, max_slots=4)
    driver = StepDriver(runner, page_count=40, page_size=16)
    goldens = load_golden()[:2]
    sequences = [
        driver.admit(slot, golden.prompt_token_ids, room=TOKENS) for slot, golden in enumerate(goldens)
    ]
    outputs = driver.run(sequences, TOKENS, chunk=5)
    for golden, tokens in zip(goldens, outputs, strict=True):
        assert tokens == golden.binding_tokens()[:TOKENS], golden.prompt
    runner.unload()
