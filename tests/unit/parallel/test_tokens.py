"""What one rank samples is what all ranks take: tokens, failures and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshkit.modelstore.sharding import ParallelLayout
from plugins.cpu.collectives import GlooCollectives
from plugins.sdk.runner import ParallelOptions, SlotAdmission
from plugins.sdk.slot_sampling import Sampled, Samplers, SlotSampling
from tests.unit.models.step_driver import GREEDY
from tests.unit.parallel.rank_threads import run_ranks
from worker_svc.parallel.ranks import Ranks
from worker_svc.parallel.tokens import share_tokens, take_tokens

VOCAB = 11
SLOTS = np.array([1, 4, 6], dtype=np.int32)
HOST = torch.device("cpu")
SAMPLERS = Samplers(argmax=lambda logits: logits.argmax(dim=-1), sample=lambda *arguments: torch.empty(0))


def admitted(*, logprobs: Sequence[int]) -> SlotSampling:
    sampling = SlotSampling(max_slots=8, vocab_size=VOCAB, device=HOST)
    for slot in SLOTS.tolist():
        settings = replace(GREEDY, logprobs=slot in logprobs)
        sampling.admit(SlotAdmission(slot, settings, 0, 0, (), ()))
    return sampling


@pytest.mark.parametrize("bad_rows", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("logprobs", [(), (4,), (1, 4, 6)], ids=str)
def test_all_ranks_have_the_outcome_of_the_one_that_samples(
    logprobs: tuple[int, ...], bad_rows: tuple[int, ...]
) -> None:
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(4))
    logits[list(bad_rows), 2] = float("nan")

    def work(options: ParallelOptions) -> tuple[Sampled, list[int]]:
        ranks = Ranks(GlooCollectives(), options, device=HOST)
        ranks.join()
        sampling = admitted(logprobs=logprobs)
        if ranks.samples:
            sampled = sampling.sample(logits, SLOTS, SAMPLERS)
            share_tokens(ranks, SLOTS, sampled)
        else:
            sampled = take_tokens(ranks, SLOTS, sampling)
        ranks.exchange("")
        ranks.close()
        return sampled, sampling.last_tokens.tolist()

    (told, kept), (heard, kept_too) = run_ranks(ParallelLayout(tensor=2), work)
    assert heard.slots.tolist() == told.slots.tolist()
    assert heard.token_ids.tolist() == told.token_ids.tolist()
    assert heard.failures == told.failures
    assert [failure.slot for failure in heard.failures] == SLOTS[list(bad_rows)].tolist()
    assert kept == kept_too
    if told.logprobs is None:
        assert heard.logprobs is None
    else:
        assert heard.logprobs is not None
        assert np.array_equal(heard.logprobs, told.logprobs)
