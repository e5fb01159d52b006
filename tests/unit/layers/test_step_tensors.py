"""A step's rows become the tensors that every layer reads."""

from __future__ import annotations

import math

import numpy as np
import torch

from plugins.sdk.runner import DecodeRows, PrefillRow, StepBatch
from worker_svc.layers.step_tensors import build_step, sampling_rows

CPU = torch.device("cpu")


def int32(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


BATCH = StepBatch(
    decode=DecodeRows(
        slots=int32(1, 4),
        positions=int32(5, 2),
        page_table=np.array([[7, 3, 0], [9, 0, 0]], dtype=np.int32),
    ),
    prefill=[
        PrefillRow(slot=0, start=3, token_ids=int32(40, 41), page_ids=int32(2, 5, 6), samples=False),
        PrefillRow(slot=2, start=0, token_ids=int32(50), page_ids=int32(8), samples=True),
    ],
)
LAST = np.array([0, 11, 0, 0, 14], dtype=np.int64)


def test_decode_rows_come_first_with_their_last_tokens() -> None:
    step = build_step(BATCH, LAST, page_size=4, dtype=torch.float32, device=CPU)
    assert step.token_ids.tolist() == [11, 14, 40, 41, 50]
    assert step.positions.tolist() == [5, 2, 3, 4, 0]


def test_cells_follow_the_page_tables() -> None:
    step = build_step(BATCH, LAST, page_size=4, dtype=torch.float32, device=CPU)
    assert step.cells.tolist() == [3 * 4 + 1, 9 * 4 + 2, 2 * 4 + 3, 5 * 4 + 0, 8 * 4]


def test_tables_are_as_narrow_as_the_longest_row_allows() -> None:
    step = build_step(BATCH, LAST, page_size=4, dtype=torch.bfloat16, device=CPU)
    assert step.decode is not None
    assert step.decode.page_table.tolist() == [[7, 3], [9, 0]]
    assert step.decode.lengths.tolist() == [6, 3]
    assert step.decode.mask.dtype == torch.bfloat16
    hidden = [[value == -math.inf for value in row] for row in step.decode.mask.tolist()]
    assert hidden == [[False] * 6 + [True] * 2, [False] * 3 + [True] * 5]
    first, second = step.prefill
    assert (first.first, first.count, first.start, first.page_ids.tolist()) == (2, 2, 3, [2, 5])
    assert (second.first, second.count, second.start, second.page_ids.tolist()) == (4, 1, 0, [8])


def test_only_decode_rows_and_last_chunks_sample() -> None:
    rows, slots = sampling_rows(BATCH)
    assert rows.tolist() == [0, 1, 4]
    assert slots.tolist() == [1, 4, 2]
    rows, slots = sampling_rows(StepBatch(decode=None, prefill=BATCH.prefill[:1]))
    assert rows.tolist() == slots.tolist() == []
