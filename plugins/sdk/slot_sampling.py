"""Sampling state of all slots as arrays, and the choice of one token for each row of logits.

A step whose rows are all plainly greedy costs no Python per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from plugins.sdk.reference import sampling
from plugins.sdk.reference.philox import uniforms
from plugins.sdk.runner import (
    AllowedTokens,
    FloatArray,
    IntArray,
    RowFailure,
    SamplingSettings,
    SlotAdmission,
)
from plugins.sdk.step_program import DrawSettings

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sampled:
    """Outcome of one step. slots, token_ids: those that sampled, in the order asked for; failures: the
    others.
    """

    slots: IntArray
    token_ids: IntArray
    logprobs: FloatArray | None
    failures: Sequence[RowFailure]


@dataclass(frozen=True)
class Samplers:
    """The chip's operators that choose tokens; signatures as on OperatorSet."""

    argmax: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]

    @classmethod
    def bind(cls, operators: OperatorBinder, vocab_size: int) -> Samplers:
        """Those of a model's plan."""
        return cls(
            argmax=operators.bind("argmax", "sampling", V=vocab_size).call,
            sample=operators.bind("sample", "sampling", V=vocab_size).call,
        )


class _History:
    """Tokens of one slot, where a penalty reads them. Dense: [vocab]."""

    def __init__(self, admission: SlotAdmission, vocab_size: int, device: torch.device) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.seen[list(admission.prompt_token_ids)] = True
        for token in admission.output_token_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """One more output token."""
        self.seen[token] = True
        self.counts[token] += 1


class SlotSampling:
    """Settings, counters and last tokens of `max_slots` slots, each a row of arrays."""

    def __init__(self, *, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.last_tokens = np.zeros(max_slots, dtype=np.int64)
        """Shape [max_slots]: the token that each slot sampled last."""
        self._temperature = np.zeros(max_slots, dtype=np.float32)
        self._top_k = np.zeros(max_slots, dtype=np.int64)
        self._top_p = np.ones(max_slots, dtype=np.float32)
        self._min_p = np.zeros(max_slots, dtype=np.float32)
        self._seed = np.zeros(max_slots, dtype=np.uint64)
        self._choice = np.zeros(max_slots, dtype=np.uint64)
        self._output_count = np.zeros(max_slots, dtype=np.int64)
        self._logprobs = np.zeros(max_slots, dtype=np.bool_)
        self._shaped = np.zeros(max_slots, dtype=np.bool_)
        self._draws = DrawSettings(
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            seed=self._seed,
            choice=self._choice,
            output_index=self._output_count,
        )
        self._settings: dict[int, SamplingSettings] = {}
        self._histories: dict[int, _History] = {}

    def admit(self, admission: SlotAdmission) -> None:
        """Take a slot's settings."""
        slot, settings = admission.slot, admission.sampling
        self._temperature[slot] = settings.temperature
        self._top_k[slot] = settings.top_k
        self._top_p[slot] = settings.top_p
        self._min_p[slot] = settings.min_p
        self._seed[slot] = settings.seed
        self._choice[slot] = settings.choice
        self._output_count[slot] = admission.output_count
        self._logprobs[slot] = settings.logprobs
        suppresses = bool(settings.suppressed_token_ids) and settings.min_tokens > 0
        self._shaped[slot] = settings.needs_history or bool(settings.logit_bias) or suppresses
        self._settings[slot] = settings
        self._histories.pop(slot, None)
        if settings.needs_history:
            self._histories[slot] = _History(admission, self._vocab_size, self._device)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._settings.pop(slot, None)
        self._histories.pop(slot, None)

    def reset(self) -> None:
        """Forget all slots."""
        self._settings.clear()
        self._histories.clear()

    def sample(
        self, logits: Tensor, slots: IntArray, operators: Samplers, allowed: AllowedTokens | None = None
    ) -> Sampled:
        """One token for each row; logits [r, vocab], slots [r]. Keeps it as the slot's last one.

        allowed: of the same rows. A row with a logit that is not finite fails alone, with reason
        NON_FINITE_LOGITS.
        """
        logits = logits.float()
        finite = sampling.finite_rows(logits).cpu().numpy()
        failures: list[RowFailure] = []
        if allowed is not None:
            logits = _without_others(logits, allowed)
        if not finite.all():
            failures = [_non_finite(int(slot)) for slot in slots[~finite]]
            logits, slots = logits[torch.from_numpy(finite).to(logits.device)], slots[finite]
        chosen = self._choose(logits, slots, operators)
        token_ids = chosen.cpu().numpy()
        self.last_tokens[slots] = token_ids
        self._output_count[slots] += 1
        if self._histories:
            self._remember(slots, token_ids)
        logprobs = self._token_logprobs(logits, slots, chosen)
        return Sampled(slots, token_ids.astype(np.int32), logprobs, failures)

    def draws(self, slots: IntArray) -> DrawSettings | None:
        """What a step program chooses tokens by; None where a slot's logits are shaped or read first."""
        if (self._shaped[slots] | self._logprobs[slots]).any():
            return None
        return self._draws

    def take(self, slots: IntArray, token_ids: IntArray) -> Sampled:
        """Keep what a step program chose by `draws(slots)`, -1 where it could not: as `sample` does."""
        failures: list[RowFailure] = []
        good = token_ids >= 0
        if not good.all():
            failures = [_non_finite(int(slot)) for slot in slots[~good]]
            slots, token_ids = slots[good], token_ids[good]
        self.last_tokens[slots] = token_ids
        self._output_count[slots] += 1
        return Sampled(slots, token_ids, None, failures)

    def _choose(self, logits: Tensor, slots: IntArray, operators: Samplers) -> Tensor:
        """int64 [r]."""
        shaped: BoolArray = self._shaped[slots]
        if shaped.any():
            logits = logits.clone()
            for row in np.flatnonzero(shaped).tolist():
                logits[row] = self._shape(logits[row], int(slots[row]))
        random: BoolArray = self._temperature[slots] > 0
        if not random.any():
            return operators.argmax(logits)
        if random.all():
            return self._draw(logits, slots, operators)
        token_ids = operators.argmax(logits)
        rows = torch.from_numpy(np.flatnonzero(random)).to(self._device)
        token_ids[rows] = self._draw(logits[rows], slots[random], operators)
        return token_ids

    def _shape(self, logits: Tensor, slot: int) -> Tensor:
        """Penalties, bias and suppression of one row."""
        settings = self._settings[slot]
        history = self._histories.get(slot)
        if history is not None:
            logits = sampling.apply_penalties(
                logits,
                history.seen,
                history.counts,
                repetition=settings.repetition_penalty,
                presence=settings.presence_penalty,
                frequency=settings.frequency_penalty,
            )
        if settings.logit_bias:
            logits = sampling.apply_bias(logits, settings.logit_bias)
        # A constraint's own bits have left them out already, where it can go on without them.
        suppresses = settings.constraint is None and self._output_count[slot] < settings.min_tokens
        if suppresses and settings.suppressed_token_ids:
            logits = sampling.suppress(logits, settings.suppressed_token_ids)
        return logits

    def _draw(self, logits: Tensor, slots: IntArray, operators: Samplers) -> Tensor:
        numbers = uniforms(
            self._seed[slots], self._choice[slots], self._output_count[slots].astype(np.uint64)
        )
        arrays = (
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            numbers,
        )
        return operators.sample(logits, *(torch.from_numpy(array).to(self._device) for array in arrays))

    def _remember(self, slots: IntArray, token_ids: npt.NDArray[np.int64]) -> None:
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            history = self._histories.get(slot)
            if history is not None:
                history.add(token)

    def _token_logprobs(self, logits: Tensor, slots: IntArray, chosen: Tensor) -> FloatArray | None:
        """Shape [r], 0 for rows that did not ask; None where none did."""
        asked: BoolArray = self._logprobs[slots]
        if not asked.any():
            return None
        values = np.zeros(len(slots), dtype=np.float32)
        rows = torch.from_numpy(np.flatnonzero(asked)).to(logits.device)
        values[asked] = sampling.token_logprobs(logits[rows], chosen[rows]).cpu().numpy()
        return values


def _without_others(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    """Logits [r, vocab] with minus infinity for what rows may not take."""
    bound = np.flatnonzero(allowed.rows >= 0)
    words = np.ascontiguousarray(allowed.words[allowed.rows[bound]])
    # On the host: not every chip shifts integers, and bits and bytes are both small beside the logits.
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    rows = torch.from_numpy(bound).to(logits.device)
    kept = sampling.keep_allowed(logits[rows], torch.from_numpy(bits.view(np.bool_)).to(logits.device))
    return logits.index_copy(0, rows, kept)


def _non_finite(slot: int) -> RowFailure:
    return RowFailure(
        slot,
        "NON_FINITE_LOGITS",
        "the model's logits for this request hold NaN or infinity; nothing was sampled",
    )
