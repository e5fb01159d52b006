"""SmolLM2 in float32 on the emulated chip: greedy tokens of the reference, batched and by chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshkit.errors import InvalidArgument
from meshkit.modelstore import default_cache_dir, open_model
from plugins.kunlun import backend
from plugins.sdk.registry import load_backend, register_backend
from plugins.sdk.runner import LoadOptions
from tests.support.golden import load_golden
from tests.unit.models.step_driver import StepDriver
from worker_svc.model_runner import OperatorModelRunner

MODEL = "smollm2-135m"
TOKENS = 20
"""Of each prompt: across a page border, few enough for a unit test."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in tests/unit/models/test_golden.py: spinning threads beside a busy process take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_greedy_tokens_are_the_references() -> None:
    try:
        open_model(MODEL, cache_dir=default_cache_dir())
    except InvalidArgument as error:
        pytest.skip(f"{error.message} (scripts/test.sh does so)")
    register_backend("kunlun", backend)
    runner = OperatorModelRunner(load_backend("kunlun", {"emulate": "true"}))
    loaded = runner.load(LoadOptions(MODEL, dtype="float32"), lambda stage, share: None)
    assert loaded.kv_layout == "layer_kv_page_head_token_value"
    assert {each.name for each in loaded.operators if each.choice == "reference"} == {"sample"}
    runner.allocate_kv_cache(page_count=40, page_size=16, max_slots=4)
    driver = StepDriver(runner, page_count=40, page_size=16)
    goldens = load_golden()[:2]
    sequences = [
        driver.admit(slot, golden.prompt_token_ids, room=TOKENS) for slot, golden in enumerate(goldens)
    ]
    outputs = driver.run(sequences, TOKENS, chunk=5)
    for golden, tokens in zip(goldens, outputs, strict=True):
        binding = golden.binding_tokens()[:TOKENS]
        assert len(binding) == TOKENS, "no near tie hides a difference"
        assert tokens == binding, golden.prompt
    runner.unload()
