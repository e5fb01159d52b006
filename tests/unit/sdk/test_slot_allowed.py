"""Rows take what they may, by the settings that they have; rows without bounds do not change by a bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from plugins.sdk.runner import AllowedTokens
from tests.unit.sdk.test_slot_sampling import (
    GREEDY,
    RANDOM,
    SAMPLERS,
    VOCAB,
    admit,
    logits_of,
    new_slots,
    take,
)


def allowing(*rows: set[int] | None) -> AllowedTokens:
    words = np.zeros((len(rows), -(-VOCAB // 32)), dtype=np.uint32)
    for row, tokens in enumerate(rows):
        for token in tokens or ():
            words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    index = [row if tokens is not None else -1 for row, tokens in enumerate(rows)]
    return AllowedTokens(np.array(index, dtype=np.int32), words)


@pytest.mark.parametrize(
    "settings", [GREEDY, RANDOM, replace(RANDOM, top_k=3), replace(RANDOM, top_p=0.5, min_p=0.1)]
)
def test_only_allowed_tokens_come_out(settings: object) -> None:
    slots = new_slots()
    admit(slots, 0, settings)  # type: ignore[arg-type]
    for step in range(20):
        logits = logits_of(step, 1)
        made = slots.sample(logits, np.array([0], dtype=np.int32), SAMPLERS, allowing({3, 17}))
        assert made.token_ids.tolist()[0] in (3, 17)


def test_a_bias_and_penalties_count_among_the_allowed() -> None:
    slots = new_slots()
    admit(slots, 0, replace(GREEDY, logit_bias={3: 100.0, 5: 50.0}, repetition_penalty=1.5))
    made = slots.sample(logits_of(0, 1), np.array([0], dtype=np.int32), SAMPLERS, allowing({5, 6}))
    assert made.token_ids.tolist() == [5]


def test_rows_without_bounds_do_not_change_by_a_bit() -> None:
    logits = logits_of(1, 3)
    alone = new_slots()
    for slot in (0, 1, 2):
        admit(alone, slot, replace(RANDOM, logprobs=True))
    before = alone.sample(logits, np.arange(3, dtype=np.int32), SAMPLERS)
    bound = new_slots()
    for slot in (0, 1, 2):
        admit(bound, slot, replace(RANDOM, logprobs=True))
    after = bound.sample(logits, np.arange(3, dtype=np.int32), SAMPLERS, allowing(None, {4}, None))
    assert before.logprobs is not None
    assert after.logprobs is not None
    assert after.token_ids.tolist() == [before.token_ids[0], 4, before.token_ids[2]]
    assert after.logprobs[[0, 2]].tobytes() == before.logprobs[[0, 2]].tobytes()
    assert after.logprobs[1] == 0.0


def test_logprobs_are_those_among_the_allowed() -> None:
    slots = new_slots()
    admit(slots, 0, replace(GREEDY, logprobs=True))
    logits = logits_of(2, 1)
    made = slots.sample(logits, np.array([0], dtype=np.int32), SAMPLERS, allowing({2, 9}))
    wanted = torch.log_softmax(logits[0, [2, 9]], dim=0).max()
    assert made.logprobs is not None
    assert float(made.logprobs[0]) == pytest.approx(float(wanted), abs=1e-6)


def test_a_bad_row_fails_alone_where_others_are_bound() -> None:
    slots = new_slots()
    for slot in (0, 1):
        admit(slots, slot, GREEDY)
    logits = logits_of(3, 2)
    logits[0, 0] = float("nan")
    made = slots.sample(logits, np.arange(2, dtype=np.int32), SAMPLERS, allowing({1}, {7}))
    assert (made.slots.tolist(), made.token_ids.tolist()) == ([1], [7])
    assert [failure.slot for failure in made.failures] == [0]
    assert take(slots, logits_of(4, 1), [1])
