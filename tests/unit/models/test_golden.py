"""SmolLM2 in float32 on the cpu plugin: the reference's tokens alone, batched, chunked, from cached pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from meshkit.errors import InvalidArgument
from meshkit.modelstore import default_cache_dir, open_model
from plugins.sdk.registry import load_backend
from plugins.sdk.runner import LoadOptions
from tests.support.golden import Golden, load_golden
from tests.unit.models.step_driver import GREEDY, StepDriver, Tracked
from worker_svc.model_runner import OperatorModelRunner

MODEL = "smollm2-135m"
COMMITTED = Path(__file__).resolve().parents[2] / "data" / "golden_smollm2.jsonl"
THREADS = 1
"""One: the tests' process loaded torch before the plugin could tell its threads not to spin, and two spinning
threads beside another busy process take minutes.
"""
PAGE = 16
PAGES = 700
REPLAYED = 24
"""Output tokens that a replay gets as part of its prompt: makes prompts longer than any chunk here."""


@pytest.fixture(scope="module")
def runner() -> Iterator[OperatorModelRunner]:
    try:
        open_model(MODEL, cache_dir=default_cache_dir())
    except InvalidArgument as error:
        pytest.skip(f"{error.message} (scripts/test.sh does so)")
    threads = torch.get_num_threads()
    made = OperatorModelRunner(load_backend("cpu", {"threads": str(THREADS)}))
    made.load(LoadOptions(MODEL), lambda stage, share: None)
    made.allocate_kv_cache(page_count=PAGES, page_size=PAGE, max_slots=32)
    yield made
    made.unload()
    torch.set_num_threads(threads)


@pytest.fixture
def driver(runner: OperatorModelRunner) -> StepDriver:
    """All pages are free again: each test begins with a scheduler that attached anew."""
    runner.reset()
    return StepDriver(runner, page_count=PAGES, page_size=PAGE)


def cut_at_end(tokens: Sequence[int], golden: Golden) -> list[int]:
    """The driver does not stop at an end token; the reference did."""
    return list(tokens[: len(golden.token_ids)])


def admit_all(driver: StepDriver, goldens: Sequence[Golden]) -> list[Tracked]:
    return [
        driver.admit(slot, golden.prompt_token_ids, room=len(golden.token_ids))
        for slot, golden in enumerate(goldens)
    ]


def test_a_batch_of_32_requests_makes_the_reference_tokens(driver: StepDriver) -> None:
    goldens = load_golden()
    filled = [goldens[index % len(goldens)] for index in range(32)]
    outputs = driver.run(admit_all(driver, filled), 48, chunk=512)
    for golden, tokens in zip(filled, outputs, strict=True):
        golden.check(cut_at_end(tokens, golden), where="batch of 32")


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_request_alone_makes_the_reference_tokens(driver: StepDriver, index: int) -> None:
    golden = load_golden()[index]
    (tokens,) = driver.run(admit_all(driver, [golden]), len(golden.token_ids), chunk=512)
    golden.check(tokens, where="alone")


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_a_replayed_prompt_in_chunks_goes_on_with_the_reference_tokens(
    driver: StepDriver, chunk: int
) -> None:
    goldens = [golden for golden in load_golden() if len(golden.token_ids) >= REPLAYED + 8][:4]
    sequences = [
        driver.admit(slot, golden.prompt_token_ids + golden.token_ids[:REPLAYED], room=8)
        for slot, golden in enumerate(goldens)
    ]
    outputs = driver.run(sequences, 6, chunk=chunk)
    for golden, tokens in zip(goldens, outputs, strict=True):
        binding = golden.binding_tokens()[REPLAYED : REPLAYED + 6]
        assert tokens[: len(binding)] == binding, f"{golden.prompt!r} in chunks of {chunk}"


def test_a_request_on_the_prefix_pages_of_another_makes_the_same_tokens(driver: StepDriver) -> None:
    golden = next(golden for golden in load_golden() if len(golden.binding_tokens()) >= 40)
    prompt = golden.prompt_token_ids + golden.token_ids[:REPLAYED]
    cached_pages = (len(prompt) - 1) // PAGE
    assert cached_pages >= 1
    first = driver.admit(0, prompt, room=8)
    driver.run([first], 8, chunk=512)
    second = driver.admit(1, prompt, room=8, shared_pages=first.pages[:cached_pages])
    driver.run([second], 8, chunk=512)
    assert second.done == len(prompt)
    assert second.made == first.made == golden.token_ids[REPLAYED : REPLAYED + 8]


def test_logprobs_are_those_of_the_reference(driver: StepDriver) -> None:
    golden = load_golden()[0]
    first_row = json.loads(COMMITTED.read_text(encoding="utf-8").splitlines()[0])
    assert first_row["prompt_token_ids"] == golden.prompt_token_ids
    settings = replace(GREEDY, logprobs=True)
    wanted = driver.admit(0, golden.prompt_token_ids, room=8, settings=settings)
    silent = driver.admit(1, golden.prompt_token_ids, room=8)
    driver.run([wanted, silent], 6, chunk=512)
    assert wanted.logprobs == pytest.approx(first_row["logprobs"][:6], abs=2e-4)
    assert silent.logprobs == [0.0] * 6


def test_steps_return_plain_int32(driver: StepDriver) -> None:
    golden = load_golden()[0]
    (sequence,) = admit_all(driver, [golden])
    output = driver.step([], [(sequence, len(golden.prompt_token_ids))])
    assert output.slots.dtype == np.int32
    assert output.token_ids.dtype == np.int32
    assert output.logprobs is None
