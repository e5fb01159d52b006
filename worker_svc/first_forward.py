"""The first forward pass after a load: a model that makes NaN or infinity never serves, and says where.

Of a split model the ranks make the pass together, and all come to the same end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition
from plugins.sdk.runner import IntArray, PrefillRow, StepBatch
from worker_svc.layers.step_tensors import build_step
from worker_svc.models.architecture import Model, Observer
from worker_svc.observed_operators import OperatorCall

_TOKENS = 8

BuildObserved = Callable[[Callable[[OperatorCall], None]], Model]
"""Builds the model once more, its operator calls shown to an observer."""


def probe_tokens(vocab_size: int, page_size: int) -> IntArray:
    """A prompt from all over the vocabulary that fits one page: int32 [n]."""
    return np.linspace(0, vocab_size - 1, min(_TOKENS, vocab_size, page_size)).astype(np.int32)


def is_finite(
    model: Model, layers: Sequence[Tensor], *, vocab_size: int, dtype: torch.dtype, page_size: int
) -> bool:
    """Whether some tokens from all over the vocabulary give finite logits; a part without a head makes none.
    layers: caches of one page at least.
    """
    logits = run_probe(model, layers, vocab_size=vocab_size, dtype=dtype, page_size=page_size)
    return logits is None or bool(torch.isfinite(logits).all())


def run_probe(
    model: Model,
    layers: Sequence[Tensor],
    *,
    vocab_size: int,
    dtype: torch.dtype,
    page_size: int,
    observe: Observer | None = None,
) -> Tensor | None:
    """Logits of a prompt that fits one page, where the model has a head; `observe` sees each stage."""
    row = PrefillRow(
        slot=0,
        start=0,
        token_ids=probe_tokens(vocab_size, page_size),
        page_ids=np.zeros(1, dtype=np.int32),
        samples=True,
    )
    step = build_step(
        StepBatch(decode=None, prefill=[row]),
        np.empty(0, dtype=np.int64),
        page_size=page_size,
        dtype=dtype,
        device=layers[0].device,
    )
    hidden = model.forward(step, layers, observe)
    return model.logits(hidden) if model.has_head else None


@dataclass(frozen=True)
class BadOperator:
    """The first operator of a pass whose result is not finite. call: its number in the pass."""

    call: int
    name: str
    where: str
    rank: str = ""
    """Number of the rank that ran it; "": the model is not split."""


def find_bad_operator(
    build: BuildObserved, layers: Sequence[Tensor], *, vocab_size: int, dtype: torch.dtype, page_size: int
) -> BadOperator | None:
    """Makes the pass again and watches it; None: here all is finite."""
    found: list[BadOperator] = []
    calls = itertools.count()

    def watch(call: OperatorCall) -> None:
        number = next(calls)
        if not found and not all(bool(torch.isfinite(each).all()) for each in call.outputs):
            found.append(BadOperator(number, call.name, call.where))

    run_probe(build(watch), layers, vocab_size=vocab_size, dtype=dtype, page_size=page_size)
    return found[0] if found else None


def describe_failure(found: BadOperator | None, dtype: torch.dtype) -> FailedPrecondition:
    """The refusal, with the operator and its place in the model."""
    where = f"{found.name} of {found.where}" if found else "no operator when run again"
    if found and found.rank:
        where += f" on rank {found.rank}"
    return FailedPrecondition(
        f"the first forward pass gave values that are not finite, first in {where}; the weights are "
        f"damaged or {str(dtype).removeprefix('torch.')} is too narrow for this model",
        field="model_path",
        reason="NON_FINITE_LOGITS",
        operator=found.name if found else "",
        where=found.where if found else "",
    )
