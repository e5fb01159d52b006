"""Slots keep their own settings, counters and history; one bad row fails alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from plugins.cpu.operators import CpuOperators
from plugins.sdk.host import HostMemory
from plugins.sdk.planning import CallSite
from plugins.sdk.runner import SamplingSettings, SlotAdmission
from plugins.sdk.slot_sampling import Samplers, SlotSampling

VOCAB = 20
SITES = [CallSite(name, "sampling", {"V": VOCAB}) for name in ("argmax", "sample")]
SAMPLERS = Samplers.bind(CpuOperators(HostMemory()).choose(SITES, dtype="float32", strict=True), VOCAB)
GREEDY = SamplingSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, {}, False, (), 0)
RANDOM = replace(GREEDY, temperature=1.0, seed=11)


def new_slots() -> SlotSampling:
    return SlotSampling(max_slots=8, vocab_size=VOCAB, device=torch.device("cpu"))


def admit(
    slots: SlotSampling, slot: int, settings: SamplingSettings, *, prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (), output_count: int | None = None,
) -> None:  # fmt: skip
    count = len(output) if output_count is None else output_count
    slots.admit(SlotAdmission(slot, settings, count, 0, prompt, output))


def take(slots: SlotSampling, logits: torch.Tensor, which: list[int]) -> list[int]:
    token_ids: list[int] = slots.sample(logits, np.array(which, dtype=np.int32), SAMPLERS).token_ids.tolist()
    return token_ids


def logits_of(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_a_request_draws_the_same_tokens_whatever_its_slot_and_neighbours() -> None:
    steps = [logits_of(step, 1) for step in range(12)]
    alone = new_slots()
    admit(alone, 0, RANDOM)
    wanted = [take(alone, logits, [0])[0] for logits in steps]
    assert len(set(wanted)) > 3

    crowd = new_slots()
    admit(crowd, 5, RANDOM)
    for slot, settings in ((1, GREEDY), (6, replace(RANDOM, seed=99, temperature=2.0, top_k=3))):
        admit(crowd, slot, settings)
    got = [
        take(crowd, torch.cat((logits_of(77, 1), logits, logits_of(78, 1))), [1, 5, 6])[1] for logits in steps
    ]
    assert got == wanted


def test_a_request_placed_again_goes_on_with_the_draws_that_it_would_have_had() -> None:
    steps = [logits_of(step, 1) for step in range(8)]
    first = new_slots()
    admit(first, 0, RANDOM)
    wanted = [take(first, logits, [0])[0] for logits in steps]
    again = new_slots()
    admit(again, 3, RANDOM, output_count=5)
    assert [take(again, logits, [3])[0] for logits in steps[5:]] == wanted[5:]


def test_choices_and_seeds_draw_apart() -> None:
    slots = new_slots()
    flat = torch.zeros(3, VOCAB)
    for slot, settings in enumerate((RANDOM, replace(RANDOM, choice=1), replace(RANDOM, seed=12))):
        admit(slots, slot, settings)
    drawn = list(zip(*(take(slots, flat, [0, 1, 2]) for _ in range(10)), strict=True))
    assert len(set(drawn)) == 3


def test_a_slot_reused_carries_nothing_over() -> None:
    slots = new_slots()
    admit(slots, 0, replace(RANDOM, logit_bias={3: 100.0}, repetition_penalty=2.0, logprobs=True))
    assert take(slots, torch.zeros(1, VOCAB), [0]) == [3]
    slots.release(0)
    admit(slots, 0, GREEDY)
    logits = logits_of(4, 1)
    outcome = slots.sample(logits, np.array([0], dtype=np.int32), SAMPLERS)
    assert outcome.token_ids.tolist() == [int(logits.argmax())]
    assert outcome.logprobs is None


def test_penalties_see_prompt_and_output_and_every_new_token() -> None:
    slots = new_slots()
    admit(slots, 0, replace(GREEDY, presence_penalty=1.0), prompt=(7,), output=(5,))
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([3.0, 2.5, 2.2])
    # 5 is in the output already (3.0 - 1); each pick is penalised from then on; the prompt's 7 is not.
    assert [take(slots, logits, [0])[0] for _ in range(4)] == [6, 7, 5, 5]


def test_repetition_counts_the_prompt() -> None:
    slots = new_slots()
    admit(slots, 0, replace(GREEDY, repetition_penalty=2.0), prompt=(5,))
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6]] = torch.tensor([3.0, 2.0])
    assert take(slots, logits, [0]) == [6]


def test_suppressed_tokens_stay_away_until_min_tokens_were_made() -> None:
    slots = new_slots()
    admit(slots, 0, replace(GREEDY, suppressed_token_ids=(2,), min_tokens=3), output_count=1)
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 9]] = torch.tensor([5.0, 4.0])
    assert [take(slots, logits, [0])[0] for _ in range(4)] == [9, 9, 2, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    slots = new_slots()
    for slot in range(3):
        admit(slots, slot, RANDOM if slot == 2 else GREEDY)
    logits = logits_of(1, 3)
    expected = take(slots, logits.clone(), [0, 1, 2])
    slots.reset()
    for slot in range(3):
        admit(slots, slot, RANDOM if slot == 2 else GREEDY)
    logits[1, 4] = bad
    outcome = slots.sample(logits, np.array([0, 1, 2], dtype=np.int32), SAMPLERS)
    assert outcome.slots.tolist() == [0, 2]
    assert outcome.token_ids.tolist() == [expected[0], expected[2]]
    assert [(failure.slot, failure.reason) for failure in outcome.failures] == [(1, "NON_FINITE_LOGITS")]


def test_when_every_row_fails_nothing_is_sampled() -> None:
    slots = new_slots()
    admit(slots, 0, GREEDY)
    outcome = slots.sample(torch.full((1, VOCAB), float("nan")), np.array([0], dtype=np.int32), SAMPLERS)
    assert outcome.slots.tolist() == outcome.token_ids.tolist() == []
    assert len(outcome.failures) == 1


def test_logprobs_ignore_penalties_bias_and_temperature() -> None:
    slots = new_slots()
    admit(slots, 0, replace(RANDOM, temperature=0.3, logit_bias={4: 100.0}, logprobs=True))
    admit(slots, 1, GREEDY)
    logits = logits_of(9, 2)
    outcome = slots.sample(logits, np.array([0, 1], dtype=np.int32), SAMPLERS)
    assert outcome.logprobs is not None
    assert outcome.logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[4]), abs=1e-5)
    assert outcome.logprobs[1] == 0.0
