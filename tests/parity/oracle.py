"""What `transformers` says of a sequence, and how near ours has to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-4
"""Of logits, relative to the largest magnitude among them; two tokens within it are a near tie."""
_MOST_TIES = 1
"""In 64 tokens: more would be no accident."""


class Oracle:
    """One model of `transformers`. Sequences are run whole and without a cache, each once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Tensor] = {}

    @property
    def config(self) -> PreTrainedConfig:
        """The model's."""
        return self._model.config

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [tokens, vocab]."""
        key = tuple(tokens)
        if key not in self._known:
            with torch.no_grad():
                self._known[key] = self._model(torch.tensor([key]), use_cache=False).logits[0].float()
        return self._known[key]

    def check_greedy(self, prompt: Sequence[int], made: Sequence[int], *, where: str) -> None:
        """Raise AssertionError unless each token is the best one after those before it.

        By induction `made` is then what the model itself continues with; within a near tie either token is
        right, and the next ones are judged by what was taken.
        """
        logits = self.logits([*prompt, *made])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(made).unsqueeze(1)).squeeze(1)
        behind = logits.amax(dim=1) - chosen
        limit = TOLERANCE * float(logits.abs().max())
        wrong = torch.nonzero(behind > limit).flatten().tolist()
        assert not wrong, (
            f"{where}: token {wrong[0]} is {made[wrong[0]]}, {behind[wrong[0]]:.3g} behind the best"
        )
        ties = int((behind > 0).sum())
        assert ties <= _MOST_TIES, f"{where}: {ties} of {len(made)} tokens are second of a near tie"

    def check_logprobs(
        self, prompt: Sequence[int], made: Sequence[int], logprobs: Sequence[float], *, where: str
    ) -> None:
        """Raise AssertionError unless log-probabilities are those of the tokens made."""
        logits = self.logits([*prompt, *made])[len(prompt) - 1 : -1]
        wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(made).unsqueeze(1)).squeeze(1)
        error = float((torch.tensor(logprobs) - wanted).abs().max())
        limit = 2 * TOLERANCE * float(logits.abs().max())
        assert error <= limit, f"{where}: a log-probability is off by {error:.3g}, limit {limit:.3g}"


def check_logits(got: Tensor, wanted: Tensor, *, where: str) -> None:
    """Raise AssertionError unless the logits agree within TOLERANCE."""
    assert got.shape == wanted.shape
    scale = float(wanted.abs().max())
    error = float((got - wanted).abs().max())
    # Written so that NaN is a difference.
    assert error <= TOLERANCE * scale, f"{where}: logits are off by {error:.3g} of {scale:.3g}"
