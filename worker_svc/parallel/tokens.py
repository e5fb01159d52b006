"""One step's tokens: chosen by one rank of a set, taken by all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from plugins.sdk.runner import IntArray
from plugins.sdk.slot_sampling import Sampled, SlotSampling
from worker_svc.parallel.ranks import Ranks

_FAILED = -1


def share_tokens(ranks: Ranks, slots: IntArray, sampled: Sampled) -> None:
    """Tell the other ranks what was sampled; slots: those that were to sample, in order."""
    words = np.zeros((2, len(slots) + 1), dtype=np.int32)
    words[0, :-1] = _FAILED
    rows = np.flatnonzero(np.isin(slots, sampled.slots))
    words[0, rows] = sampled.token_ids
    if sampled.logprobs is not None:
        words[0, -1] = 1
        words[1, rows] = sampled.logprobs.view(np.int32)
    ranks.share_choice(torch.from_numpy(words))


def take_tokens(ranks: Ranks, slots: IntArray, sampling: SlotSampling) -> Sampled:
    """What the sampling rank says, kept as the slots' last tokens: the same outcome as it had."""
    form = torch.zeros((2, len(slots) + 1), dtype=torch.int32)
    words = ranks.share_choice(form).cpu().numpy()
    token_ids = words[0, :-1]
    taken = sampling.take(slots, token_ids)
    if not words[0, -1]:
        return taken
    logprobs = words[1, :-1][token_ids != _FAILED].view(np.float32)
    return replace(taken, logprobs=logprobs)
