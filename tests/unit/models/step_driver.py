"""Drives a runner by steps as a scheduler would: slots, page tables, chunks; greedy unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plugins.sdk.runner import (
    DecodeRows,
    IntArray,
    ModelRunner,
    PrefillRow,
    SamplingSettings,
    SlotAdmission,
    StepBatch,
    StepOutput,
)

GREEDY = SamplingSettings(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    choice=0,
    logit_bias={},
    logprobs=False,
    suppressed_token_ids=(),
    min_tokens=0,
)


@dataclass
class Tracked:
    """One request: what it was given, what it made, and its pages."""

    slot: int
    prompt: Sequence[int]
    pages: IntArray
    done: int
    """Prompt tokens whose keys and values are in the pages."""
    made: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class StepDriver:
    """Slots from 0; pages are handed out in a shuffled order and never given back, so a wrong page shows."""

    def __init__(self, runner: ModelRunner, *, page_count: int, page_size: int) -> None:
        self._runner = runner
        self._page_size = page_size
        self._free = np.random.default_rng(5).permutation(page_count).astype(np.int32)

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        room: int,
        settings: SamplingSettings = GREEDY,
        shared_pages: IntArray | None = None,
        output_count: int = 0,
    ) -> Tracked:
        """Enter a slot with pages for the prompt and `room` tokens; `shared_pages` hold its first tokens."""
        shared = np.empty(0, dtype=np.int32) if shared_pages is None else shared_pages
        needed = -(-(len(prompt) + room) // self._page_size) - len(shared)
        own, self._free = self._free[:needed], self._free[needed:]
        assert len(own) == needed, "the test needs more pages"
        pages = np.concatenate((shared, own))
        cached = len(shared) * self._page_size
        history = list(prompt) if settings.needs_history else []
        split = len(history) - output_count
        admission = SlotAdmission(slot, settings, output_count, cached, history[:split], history[split:])
        self._runner.admit(admission, pages)
        return Tracked(slot, prompt, pages, cached)

    def step(self, decoding: Sequence[Tracked], chunks: Sequence[tuple[Tracked, int]] = ()) -> StepOutput:
        """One forward pass: a token of each decoding sequence, and the next `n` prompt tokens of others."""
        prefill = [self._chunk(sequence, count) for sequence, count in chunks]
        output = self._runner.run_step(StepBatch(self._decode_rows(decoding), prefill))
        for sequence, count in chunks:
            sequence.done += count
        by_slot = {sequence.slot: sequence for sequence in (*decoding, *(item for item, _ in chunks))}
        for row, slot in enumerate(output.slots.tolist()):
            by_slot[slot].made.append(int(output.token_ids[row]))
            if output.logprobs is not None:
                by_slot[slot].logprobs.append(float(output.logprobs[row]))
        return output

    def run(self, sequences: Sequence[Tracked], count: int, *, chunk: int) -> list[list[int]]:
        """Continuous batching: prompts by chunks beside whatever decodes, until all have `count` tokens."""
        while any(len(sequence.made) < count for sequence in sequences):
            waiting = [item for item in sequences if item.done < len(item.prompt)]
            decoding = [item for item in sequences if item.made and len(item.made) < count]
            self.step(decoding, [(item, min(chunk, len(item.prompt) - item.done)) for item in waiting])
        return [sequence.made for sequence in sequences]

    def release(self, sequences: Sequence[Tracked]) -> None:
        """The requests leave; their pages are not reused."""
        for sequence in sequences:
            self._runner.release(sequence.slot)

    def _decode_rows(self, sequences: Sequence[Tracked]) -> DecodeRows | None:
        if not sequences:
            return None
        ordered = sorted(sequences, key=lambda item: item.slot)
        table = np.zeros((len(ordered), max(len(item.pages) for item in ordered)), dtype=np.int32)
        for row, item in enumerate(ordered):
            table[row, : len(item.pages)] = item.pages
        positions = [len(item.prompt) + len(item.made) - 1 for item in ordered]
        return DecodeRows(
            slots=np.array([item.slot for item in ordered], dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            page_table=table,
        )

    def _chunk(self, sequence: Tracked, count: int) -> PrefillRow:
        end = sequence.done + count
        return PrefillRow(
            slot=sequence.slot,
            start=sequence.done,
            token_ids=np.array(sequence.prompt[sequence.done : end], dtype=np.int32),
            page_ids=sequence.pages,
            samples=end == len(sequence.prompt),
        )


def sampled(seed: int, **changes: object) -> SamplingSettings:
    """Settings of a random request."""
    return replace(GREEDY, temperature=1.0, seed=seed, **changes)  # type: ignore[arg-type]
