"""A model over several ranks gives what one rank gives: every family, over tensor ranks and over stages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshkit.modelstore.sharding import ParallelLayout
from plugins.sdk.runner import (
    AllowedTokens,
    LoadedModel,
    LoadOptions,
    ParallelOptions,
    SamplingSettings,
    StepBatch,
    StepOutput,
)
from tests.parity.conftest import Family
from tests.parity.paths import PAGE, backend_of, plan, silent, whole_logits
from tests.parity.tiny_models import PROMPTS, VARIANTS, VOCAB
from tests.unit.models.step_driver import GREEDY, StepDriver, sampled
from tests.unit.parallel.rank_threads import run_ranks
from worker_svc.layers.step_tensors import sampling_rows
from worker_svc.model_building import plan_model
from worker_svc.model_runner import OperatorModelRunner
from worker_svc.parallel.set_loading import join_ranks

MADE, SHORT = 64, 12
PAGES = 80
TENSOR = ParallelLayout(tensor=2)
STAGES = ParallelLayout(pipeline=2)
BOTH = ParallelLayout(tensor=2, pipeline=2)
EVERY_PROMPT = [*PROMPTS, [*PROMPTS[0][:32], *PROMPTS[2]]]
"""The last one finds its first 32 tokens cached."""
ONE_OF_EACH = (
    "llama", "mistral-window", "mixtral", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "gemma2", "gemma3",
)  # fmt: skip
GREEDY_RUNS = [
    pytest.param(name, count, id=f"{name}-{count}", marks=marks)
    for name in VARIANTS
    for count, marks in ((MADE if name in ONE_OF_EACH else SHORT, ()), (MADE, pytest.mark.nightly))
    if not (name in ONE_OF_EACH and marks)
]
"""The switches of a family change what a rank computes by itself: all tokens of each, by night."""


@pytest.fixture(autouse=True, scope="module")
def _short_turns() -> Iterator[None]:
    """Ranks are threads here: one that waits for a sum gets its turn soon after the other has sent."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    yield
    sys.setswitchinterval(before)


@dataclass(frozen=True)
class Outcome:
    """What a rank says of the model, and what it made: by request, tokens and log-probabilities."""

    model: LoadedModel
    made: list[list[int]]
    logprobs: list[list[float]]


class Bound(OperatorModelRunner):
    """A runner whose requests may take even tokens only, but for the first one's."""

    def run_step(self, batch: StepBatch) -> StepOutput:
        _, slots = sampling_rows(batch)
        rows = np.where(slots == 0, -1, 0).astype(np.int32)
        words = np.full((1, -(-VOCAB // 32)), 0x55555555, dtype=np.uint32)
        return super().run_step(replace(batch, allowed=AllowedTokens(rows, words)))


def serve(
    folder: Path,
    settings: Sequence[SamplingSettings],
    count: int,
    parallel: ParallelOptions | None = None,
    *,
    kind: type[OperatorModelRunner] = OperatorModelRunner,
) -> Outcome:
    """All prompts by chunks; the last one comes when its first pages are full, and joins the others."""
    runner = kind(backend_of("operators"))
    try:
        model = runner.load(LoadOptions(str(folder), dtype="float32", parallel=parallel), silent)
        runner.allocate_kv_cache(page_count=PAGES, page_size=PAGE, max_slots=4)
        driver = StepDriver(runner, page_count=PAGES, page_size=PAGE)
        tracked = [
            driver.admit(slot, prompt, room=count, settings=settings[slot])
            for slot, prompt in enumerate(PROMPTS)
        ]
        driver.run(tracked, 2, chunk=16)
        shared = tracked[0].pages[:4]
        tracked.append(
            driver.admit(3, EVERY_PROMPT[3], room=count, settings=settings[3], shared_pages=shared)
        )
        driver.run(tracked, count, chunk=16)
        return Outcome(model, [each.made for each in tracked], [each.logprobs for each in tracked])
    finally:
        runner.unload()


@pytest.mark.parametrize(("family", "count"), GREEDY_RUNS, indirect=["family"])
def test_two_tensor_ranks_give_the_greedy_tokens_of_one(family: Family, count: int) -> None:
    settings = [GREEDY] * len(EVERY_PROMPT)
    alone = serve(family.folder, settings, count)
    first, second = run_ranks(TENSOR, partial(serve, family.folder, settings, count))
    assert first.made == second.made, "the ranks go apart"
    assert first.made == alone.made
    assert [len(made) for made in first.made] == [count] * len(EVERY_PROMPT)
    for prompt, made in zip(EVERY_PROMPT, first.made, strict=True):
        family.oracle.check_greedy(prompt, made, where=f"two ranks, {len(prompt)} tokens")
    assert first.model.numeric_class == "float32+tp2"
    assert first.model.kv_bytes_per_token * 2 == alone.model.kv_bytes_per_token
    assert first.model.weight_bytes < alone.model.weight_bytes * 0.75


def logits_on(folder: Path, tokens: Sequence[int], parallel: ParallelOptions) -> Tensor:
    """Of a rank without the head something else."""
    options = LoadOptions(str(folder), dtype="float32", parallel=parallel)
    backend = backend_of("operators")
    planned = plan_model(backend, options, silent)
    ranks = join_ranks(backend, options, planned.device)
    assert ranks is not None
    try:
        return whole_logits(replace(planned, links=ranks), tokens)
    finally:
        ranks.close()


@pytest.mark.parametrize("family", VARIANTS, indirect=True)
def test_two_stages_give_the_very_logits_of_one(family: Family) -> None:
    tokens = [*PROMPTS[0], *PROMPTS[2]]
    alone = whole_logits(plan("operators", family.folder), tokens)
    _, staged = run_ranks(STAGES, partial(logits_on, family.folder, tokens))
    assert torch.equal(staged, alone)


def mixed_settings() -> list[SamplingSettings]:
    """A seed alone, penalties, filters, and greedy with a bias; all with log-probabilities."""
    return [
        replace(each, logprobs=True)
        for each in (
            sampled(7),
            sampled(8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
            sampled(9, top_k=20, top_p=0.9, min_p=0.01),
            replace(GREEDY, logit_bias={5: 2.0, 6: -100.0}, repetition_penalty=1.1),
        )
    ]


@pytest.mark.parametrize("kind", [OperatorModelRunner, Bound], ids=["free", "bound"])
@pytest.mark.parametrize("layout", [TENSOR, STAGES], ids=["tensor", "stages"])
@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_sampling_over_ranks_is_that_of_one(
    family: Family, layout: ParallelLayout, kind: type[OperatorModelRunner]
) -> None:
    alone = serve(family.folder, mixed_settings(), SHORT, kind=kind)
    ranks = run_ranks(layout, partial(serve, family.folder, mixed_settings(), SHORT, kind=kind))
    for rank in ranks:
        assert rank.made == alone.made
        assert rank.logprobs == ranks[0].logprobs
    error = np.abs(np.subtract(ranks[0].logprobs, alone.logprobs)).max()
    assert error == 0 if layout == STAGES else error < 1e-4
    assert {len(each) for each in alone.logprobs} == {SHORT}
    odd = [token for made in alone.made[1:] for token in made if token % 2]
    assert bool(odd) is (kind is OperatorModelRunner)
    assert ranks[0].model.numeric_class == ("float32" if layout == STAGES else "float32+tp2")


@pytest.mark.parametrize("family", ["qwen2-moe"], indirect=True)
def test_two_stages_of_two_ranks_give_the_greedy_tokens_of_one(family: Family) -> None:
    settings = [GREEDY] * len(EVERY_PROMPT)
    alone = serve(family.folder, settings, SHORT)
    ranks = run_ranks(BOTH, partial(serve, family.folder, settings, SHORT))
    for rank in ranks:
        assert rank.made == alone.made
    # Three layers: two of them in the first stage, and half of their heads on each rank.
    share = [alone.model.kv_bytes_per_token // each for each in (3, 3, 6, 6)]
    assert [rank.model.kv_bytes_per_token for rank in ranks] == share
