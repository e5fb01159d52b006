"""Reference sampling: penalties, then temperature, top-k, top-p, min-p, then an inverse-CDF draw.

Every row is a function of its own logits, settings and random number: no row sees another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """The token of the largest logit, the lowest id among equals: [r, vocab] -> int64 [r]."""
    return logits.argmax(dim=-1)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Draw one token a row: float32 [r, vocab] -> int64 [r].

    temperature: float32 [r], > 0. top_k: int64 [r], 0: all. top_p: float32 [r] in (0, 1]. min_p: float32 [r]
    in [0, 1]. uniform: float64 [r] in [0, 1). Filters apply in that order, top_p to what top_k left; tokens
    that tie with the last one kept are kept too, so that no order among equals matters. The draw walks the
    filtered distribution in order of token ids, in float64.
    """
    scores = scaled_scores(logits, temperature)
    ordered = scores.sort(dim=-1, descending=True).values
    by_k = top_k_floor(ordered, top_k)
    by_p, found = top_p_floor(scores, ordered, by_k, top_p)
    # Summed in another order, all tokens may miss p by the last ulp: then the set is all of them.
    by_p = by_p.masked_fill(~found, float("-inf"))
    return draw(scores, torch.maximum(torch.maximum(by_k, by_p), min_p_floor(min_p)), uniform)


def scaled_scores(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logit - largest) / temperature in float64: log-weights, 0 for the most likely token."""
    wide = logits.double()
    largest = wide.amax(dim=-1, keepdim=True)
    return (wide - largest) / temperature.double().unsqueeze(1)


def top_k_floor(ordered: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest of `ordered` (float64 [r, at least k], descending); -inf where top_k is 0: [r]."""
    last = (top_k.clamp(max=ordered.shape[1]) - 1).clamp(min=0).unsqueeze(1)
    kth = ordered.gather(1, last).squeeze(1)
    return kth.masked_fill(top_k == 0, float("-inf"))


def min_p_floor(min_p: Tensor) -> Tensor:
    """The score of a token that is min_p times as likely as the most likely one; -inf where min_p is 0:
    [r].
    """
    return min_p.double().log()


def top_p_floor(scores: Tensor, ordered: Tensor, kept_above: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The score of the last token of the smallest set whose share reaches p, -inf for p = 1: [r].

    kept_above: float64 [r], the floor of the filter before; the share is of what that left.
    ordered: the largest scores, descending. Also returns whether they sufficed to reach p: bool [r].
    """
    above = kept_above.unsqueeze(1)
    total = _weights(scores, above).cumsum(dim=-1)[:, -1:]
    reached = _weights(ordered, above).cumsum(dim=-1) >= top_p.double().unsqueeze(1) * total
    first = reached.to(torch.uint8).argmax(dim=-1, keepdim=True)
    floor = ordered.gather(1, first).squeeze(1).masked_fill(top_p >= 1, float("-inf"))
    return floor, reached.any(dim=-1) | (top_p >= 1)


def draw(scores: Tensor, floor: Tensor, uniform: Tensor) -> Tensor:
    """The token at share `uniform` of the weights of scores >= floor, in order of token ids: int64 [r]."""
    cumulative = _weights(scores, floor.unsqueeze(1)).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # uniform < 1, but the product may round up to the total, past the last token.
    target = torch.minimum(uniform.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _weights(scores: Tensor, floor: Tensor) -> Tensor:
    return scores.exp().mul_(scores >= floor)


def apply_penalties(
    logits: Tensor,
    prompt_or_output: Tensor,
    output_counts: Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """Penalised logits [vocab] of one row.

    repetition: divides positive and multiplies negative logits of tokens seen (Keskar et al. 2019).
    presence, frequency: subtracted, the second times the count, for tokens in the output.
    prompt_or_output: bool [vocab]. output_counts: int32 [vocab].
    """  # fmt: skip
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(prompt_or_output, repeated, logits)
    return penalised - presence * (output_counts > 0) - frequency * output_counts


def apply_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Logits [vocab] of one row with `bias` added by token id."""
    ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, ids, values)


def suppress(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Logits [vocab] of one row without some tokens."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
    return logits.index_fill(0, ids, float("-inf"))


def keep_allowed(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [r, vocab] with minus infinity where `allowed`, bool [r, vocab], is false."""
    return logits.masked_fill(~allowed, float("-inf"))


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probability of one token a row under the model's own distribution: float32 [r].

    The raw distribution, as the model made it: before penalties, bias, temperature and filters. Of a
    constrained row, that over the tokens which the constraint allows: its other logits are minus infinity.
    """
    chosen = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return (chosen - logits.logsumexp(dim=-1)).float()


def finite_rows(logits: Tensor) -> Tensor:
    """Whether every logit of a row is finite: bool [r]."""
    # A sum of finite float32 logits is finite unless they are absurd, and costs one pass; it decides most
    # often.
    sums = torch.isfinite(logits.sum(dim=-1))
    return sums if bool(sums.all()) else torch.isfinite(logits).all(dim=-1)
