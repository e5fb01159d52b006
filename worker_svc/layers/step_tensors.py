"""One step's rows as tensors: what every layer of a forward pass reads, built once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plugins.sdk.runner import DecodeRows, IntArray, PrefillRow, StepBatch

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DecodeTensors:
    """b decode rows; see the operator attention_decode for the forms."""

    page_table: Tensor
    lengths: Tensor
    mask: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.page_table.shape[0]


@dataclass(frozen=True)
class PrefillTensors:
    """A run of tokens of one sequence: rows first to first + count - 1 of the step."""

    first: int
    count: int
    start: int
    page_ids: Tensor


@dataclass(frozen=True)
class StepTensors:
    """t tokens: decode rows first, then each prefill row's run.

    token_ids, positions, cells: int64 [t]; cells says where each token's keys and values go.
    """

    token_ids: Tensor
    positions: Tensor
    cells: Tensor
    decode: DecodeTensors | None
    prefill: Sequence[PrefillTensors]


def build_step(
    batch: StepBatch, last_tokens: Int64Array, *, page_size: int, dtype: torch.dtype, device: torch.device
) -> StepTensors:
    """The tensors of a step. last_tokens: int64 [slots], the input of decode rows. dtype: of the mask."""
    tokens: list[Int64Array] = []
    positions: list[Int64Array] = []
    cells: list[Int64Array] = []
    decode = None
    if batch.decode is not None:
        rows = batch.decode
        tokens.append(last_tokens[rows.slots])
        positions.append(rows.positions.astype(np.int64))
        cells.append(_decode_cells(rows, page_size))
        decode = _decode_tensors(rows, page_size, dtype, device)
    prefill: list[PrefillTensors] = []
    first = sum(map(len, tokens))
    for row in batch.prefill:
        run = np.arange(row.start, row.start + len(row.token_ids), dtype=np.int64)
        tokens.append(row.token_ids.astype(np.int64))
        positions.append(run)
        cells.append(row.page_ids[run // page_size].astype(np.int64) * page_size + run % page_size)
        prefill.append(_prefill_tensors(row, first, page_size, device))
        first += len(run)
    return StepTensors(
        token_ids=_to_device(tokens, device),
        positions=_to_device(positions, device),
        cells=_to_device(cells, device),
        decode=decode,
        prefill=prefill,
    )


def sampling_rows(batch: StepBatch) -> tuple[Int64Array, IntArray]:
    """(index of each sampling row among the step's tokens, its slot): decode rows, then last chunks."""
    decode_slots = batch.decode.slots if batch.decode is not None else np.empty(0, dtype=np.int32)
    indices = list(range(len(decode_slots)))
    slots = decode_slots.tolist()
    end = len(indices)
    for row in batch.prefill:
        end += len(row.token_ids)
        if row.samples:
            indices.append(end - 1)
            slots.append(row.slot)
    return np.array(indices, dtype=np.int64), np.array(slots, dtype=np.int32)


def _decode_cells(rows: DecodeRows, page_size: int) -> Int64Array:
    pages = rows.page_table[np.arange(len(rows.slots)), rows.positions // page_size].astype(np.int64)
    return pages * page_size + rows.positions % page_size


def _decode_tensors(
    rows: DecodeRows, page_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeTensors:
    # The table is as wide as the longest row's pages: narrower means less to gather.
    width = int(rows.positions.max()) // page_size + 1
    lengths = rows.positions.astype(np.int64) + 1
    hidden = torch.from_numpy(np.arange(width * page_size) >= lengths[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return DecodeTensors(
        page_table=torch.from_numpy(rows.page_table[:, :width].astype(np.int64)).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        mask=mask.to(device),
    )


def _prefill_tensors(row: PrefillRow, first: int, page_size: int, device: torch.device) -> PrefillTensors:
    count = len(row.token_ids)
    pages = (row.start + count - 1) // page_size + 1
    return PrefillTensors(
        first=first,
        count=count,
        start=row.start,
        page_ids=torch.from_numpy(row.page_ids[:pages].astype(np.int64)).to(device),
    )


def _to_device(parts: Sequence[Int64Array], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
