"""The input of a comparison: a prompt in two chunks, the second of which reads the cache, then decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder
from plugins.sdk.runner import DecodeRows, IntArray, PrefillRow, StepBatch

PROMPT_TOKENS = 40
DECODE_STEPS = 2
_FIRST_CHUNK = 0.6
"""Share of the prompt in the first chunk: the two differ in length, and neither fills its last page."""
_STRIDE = 2654435761
"""Knuth's multiplicative hash: ids from all over the vocabulary, the same everywhere."""


@dataclass(frozen=True)
class Step:
    """One forward pass. name: for people. batch: of slot 0; a decode row's token is the last one sampled."""

    name: str
    batch: StepBatch


def built_in_prompt(vocab_size: int) -> list[int]:
    """Some token ids of any vocabulary."""
    return [index * _STRIDE % vocab_size for index in range(1, PROMPT_TOKENS + 1)]


def encode_prompt(text: str, folder: ModelFolder) -> list[int]:
    """The token ids of a text, without a chat template.

    Raises:
        InvalidArgument: (--prompt) it has no token, or more than the model's context holds.
    """
    import tokenizers  # noqa: PLC0415 - only where a text is given

    ids: list[int] = tokenizers.Tokenizer.from_file(str(folder.tokenizer_file)).encode(text).ids
    most = folder.context_length - DECODE_STEPS
    if not 1 <= len(ids) <= most:
        raise InvalidArgument(
            f"--prompt has {len(ids)} tokens; it must have 1 to {most} for this model", field="--prompt"
        )
    return ids


def count_pages(prompt_tokens: int, page_size: int) -> int:
    """Pages for the prompt and what is decoded."""
    return -(-(prompt_tokens + DECODE_STEPS) // page_size)


def plan_steps(prompt: Sequence[int], page_size: int) -> list[Step]:
    """The prompt's chunks, then decode steps of the token that each sampled last."""
    pages = count_pages(len(prompt), page_size)
    # Not in order, so that an operator that takes cells for positions shows.
    page_ids = np.arange(pages, dtype=np.int32)[::-1].copy()
    middle = -int(-len(prompt) * _FIRST_CHUNK // 1)
    edges = [(0, middle), (middle, len(prompt))]
    steps = [_prefill(prompt, page_ids, start, end) for start, end in edges if end > start]
    return steps + [_decode(len(prompt) + index, page_ids) for index in range(DECODE_STEPS)]


def _prefill(prompt: Sequence[int], page_ids: IntArray, start: int, end: int) -> Step:
    tokens = np.array(prompt[start:end], dtype=np.int32)
    row = PrefillRow(0, start, tokens, page_ids, samples=end == len(prompt))
    return Step(f"prefill {start}-{end - 1}", StepBatch(decode=None, prefill=[row]))


def _decode(position: int, page_ids: IntArray) -> Step:
    rows = DecodeRows(
        slots=np.zeros(1, dtype=np.int32),
        positions=np.array([position], dtype=np.int32),
        page_table=page_ids[np.newaxis],
    )
    return Step(f"decode {position}", StepBatch(decode=rows, prefill=[]))
