"""The executor's side of step plans: which request sits in which slot, its page table, how far it is.

A plan is a difference. It is checked whole before any of it is applied, so a plan that is refused changes
nothing. No torch: plain numpy, on the one thread that owns the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chipmesh.device.v1alpha1.execution_pb2 import PrefillChunk, StepPlan
from meshkit.errors import Aborted, InvalidArgument
from plugins.sdk.runner import DecodeRows, IntArray, PrefillRow, SlotAdmission, StepBatch
from worker_svc.plan_reading import read_admission, read_ids

_WIDTH_STEP = 16
"""Page tables grow by this many pages, so that they are not reallocated for every page."""


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    """What a runner must do for one plan, in this order. Arrays are valid until the next plan is applied."""

    released: Sequence[int]
    admitted: Sequence[tuple[SlotAdmission, IntArray]]
    """Each with its page table so far."""
    batch: StepBatch | None
    """None where the plan computes nothing."""


@dataclass(slots=True)
class _CheckedPlan:
    """A plan that fits the table's state, read into arrays."""

    released: list[int]
    admitted: list[tuple[SlotAdmission, IntArray]]
    pages: list[tuple[int, IntArray]]
    prefill: list[tuple[PrefillChunk, IntArray]]


@dataclass(slots=True)
class _DecodeCache:
    """Decode arrays of an unchanged batch: reused from step to step."""

    rows: DecodeRows
    capacity: IntArray
    """Shape [b]: tokens that each slot's pages hold."""


class SlotTable:
    """All slots of an executor under one epoch.

    page_count, page_size (tokens), max_slots, vocab_size: at least 1; ids in plans are checked against them.
    """

    def __init__(self, *, page_count: int, page_size: int, max_slots: int, vocab_size: int) -> None:
        self._page_count = page_count
        self._page_size = page_size
        self._max_slots = max_slots
        self._vocab_size = vocab_size
        self._epoch = 0
        self._step_seq = 0
        self._occupied: npt.NDArray[np.bool_] = np.zeros(max_slots, dtype=np.bool_)
        self._decoding: npt.NDArray[np.bool_] = np.zeros(max_slots, dtype=np.bool_)
        self._positions: IntArray = np.zeros(max_slots, dtype=np.int32)
        self._table_lengths: IntArray = np.zeros(max_slots, dtype=np.int32)
        self._tables: IntArray = np.zeros((max_slots, _WIDTH_STEP), dtype=np.int32)
        self._cache: _DecodeCache | None = None

    def __repr__(self) -> str:
        return (
            f"<SlotTable epoch={self._epoch} step={self._step_seq} "
            f"occupied={self.occupied}/{self._max_slots}>"
        )

    @property
    def occupied(self) -> int:
        """Slots that hold a request."""
        return int(np.count_nonzero(self._occupied))

    @property
    def epoch(self) -> int:
        """The epoch whose plans are taken; 0 before the first."""
        return self._epoch

    def position(self, slot: int) -> int:
        """Tokens of a slot whose keys and values are in its pages: the position that is written next."""
        return int(self._positions[slot])

    def page_table(self, slot: int) -> IntArray:
        """A slot's pages in order of position, shape [pages]. Valid until the next plan is applied."""
        return self._tables[slot, : self._table_lengths[slot]]

    def reset(self, *, epoch: int) -> None:
        """Drop all slots; the next plan is number 1 of `epoch`. Epoch 0 takes no plan."""
        self._epoch = epoch
        self._step_seq = 0
        self._occupied[:] = False
        self._decoding[:] = False
        self._positions[:] = 0
        self._table_lengths[:] = 0
        self._cache = None

    def stop_decoding(self, slot: int) -> None:
        """A slot's request failed: it makes no more tokens, until it is released."""
        if self._decoding[slot]:
            self._decoding[slot] = False
            self._cache = None

    def apply(self, plan: StepPlan) -> AppliedPlan:
        """Take one plan.

        Raises:
            Aborted: stale epoch, or `step_seq` is not the next one.
            InvalidArgument: the plan contradicts the table's state, or an id is out of range; the field is
                named. Nothing of the plan was applied: the right plan of the same number may follow.
        """
        self._check_order(plan)
        checked = self._check(plan)
        self._step_seq = plan.step_seq
        if checked is None:
            return AppliedPlan((), (), _batch(self._take_decode_rows(plan.decode), ()))
        for slot in checked.released:
            self._release(slot)
        for admission, page_ids in checked.admitted:
            self._admit(admission, page_ids)
        admitted = [(admission, self.page_table(admission.slot)) for admission, _ in checked.admitted]
        for slot, page_ids in checked.pages:
            self._append_pages(slot, page_ids)
        decode = self._take_decode_rows(plan.decode)
        prefill = [self._take_chunk(chunk, tokens) for chunk, tokens in checked.prefill]
        return AppliedPlan(checked.released, admitted, _batch(decode, prefill))

    # ---- checks: nothing below here up to "state" changes anything

    def _check_order(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch or not self._epoch:
            raise Aborted(
                f"plan.epoch is {plan.epoch}; the executor takes {self._epoch or 'none'}. Attach again",
                reason="STALE_EPOCH",
                epoch=self._epoch,
            )
        if plan.step_seq != self._step_seq + 1:
            raise Aborted(
                f"plan.step_seq is {plan.step_seq}; the next one is {self._step_seq + 1}. "
                "Attach again and send a full plan",
                reason="STEP_GAP",
                expected=self._step_seq + 1,
            )

    def _check(self, plan: StepPlan) -> _CheckedPlan | None:
        """The plan in arrays; None where it changes no slot but by decoding."""
        if not (plan.released_slots or plan.admitted or plan.pages or plan.prefill):
            if plan.decode:
                self._check_decode_room({}, frozenset())
            return None
        released = self._check_released(plan)
        admitted = self._check_admitted(plan, frozenset(released))
        entered = {admission.slot: admission for admission, _ in admitted}
        appended = self._check_pages(plan, frozenset(released), entered)
        lengths = {admission.slot: len(page_ids) for admission, page_ids in admitted}
        for slot, page_ids in appended:
            before = lengths.get(slot, int(self._table_lengths[slot]))
            lengths[slot] = before + len(page_ids)
            self._check_table_length(slot, lengths[slot])
        prefill = self._check_prefill(plan, frozenset(released), entered, lengths)
        if plan.decode:
            self._check_decode_room(lengths, frozenset(released))
        return _CheckedPlan(released, admitted, appended, prefill)

    def _check_slot(self, slot: int, field: str) -> None:
        if slot >= self._max_slots:
            raise InvalidArgument(
                f"{field} is {slot}; slots run from 0 to {self._max_slots - 1}", field=field
            )

    def _check_released(self, plan: StepPlan) -> list[int]:
        released = list(plan.released_slots)
        for slot in released:
            self._check_slot(slot, "plan.released_slots")
            if not self._occupied[slot]:
                raise InvalidArgument(
                    f"plan.released_slots names slot {slot}, which holds no request",
                    field="plan.released_slots",
                )
        if len(set(released)) != len(released):
            raise InvalidArgument("plan.released_slots names a slot twice", field="plan.released_slots")
        return released

    def _check_admitted(
        self, plan: StepPlan, released: frozenset[int]
    ) -> list[tuple[SlotAdmission, IntArray]]:
        admitted: list[tuple[SlotAdmission, IntArray]] = []
        entered: set[int] = set()
        for index, request in enumerate(plan.admitted):
            field = f"plan.admitted[{index}]"
            slot = request.slot
            self._check_slot(slot, f"{field}.slot")
            if slot in entered or (self._occupied[slot] and slot not in released):
                raise InvalidArgument(
                    f"{field}.slot is {slot}, which holds a request; release it first", field=f"{field}.slot"
                )
            entered.add(slot)
            page_ids = read_ids(request.page_ids, limit=self._page_count, field=f"{field}.page_ids")
            self._check_table_length(slot, len(page_ids))
            room = len(page_ids) * self._page_size
            if request.cached_tokens > room:
                raise InvalidArgument(
                    f"{field}.cached_tokens is {request.cached_tokens}; its pages hold {room} tokens",
                    field=f"{field}.cached_tokens",
                )
            admitted.append((read_admission(request, vocab_size=self._vocab_size, field=field), page_ids))
        return admitted

    def _check_pages(
        self, plan: StepPlan, released: frozenset[int], entered: dict[int, SlotAdmission]
    ) -> list[tuple[int, IntArray]]:
        appended: list[tuple[int, IntArray]] = []
        for index, delta in enumerate(plan.pages):
            field = f"plan.pages[{index}]"
            self._check_live(delta.slot, f"{field}.slot", released, entered)
            page_ids = read_ids(delta.page_ids, limit=self._page_count, field=f"{field}.page_ids")
            appended.append((delta.slot, page_ids))
        return appended

    def _check_live(
        self, slot: int, field: str, released: frozenset[int], entered: dict[int, SlotAdmission]
    ) -> None:
        self._check_slot(slot, field)
        if slot not in entered and (slot in released or not self._occupied[slot]):
            raise InvalidArgument(f"{field} is {slot}, which holds no request; admit it first", field=field)

    def _check_table_length(self, slot: int, length: int) -> None:
        if length > self._page_count:
            raise InvalidArgument(
                f"slot {slot} would have {length} pages; the cache has {self._page_count}", field="plan.pages"
            )

    def _check_prefill(
        self,
        plan: StepPlan,
        released: frozenset[int],
        entered: dict[int, SlotAdmission],
        lengths: dict[int, int],
    ) -> list[tuple[PrefillChunk, IntArray]]:
        chunks: list[tuple[PrefillChunk, IntArray]] = []
        seen: set[int] = set()
        for index, chunk in enumerate(plan.prefill):
            field = f"plan.prefill[{index}]"
            slot = chunk.slot
            self._check_live(slot, f"{field}.slot", released, entered)
            if slot in seen or (self._decoding[slot] and slot not in entered):
                raise InvalidArgument(
                    f"{field}.slot is {slot}, which has a chunk in this plan or is decoding already",
                    field=f"{field}.slot",
                )
            seen.add(slot)
            position = entered[slot].cached_tokens if slot in entered else int(self._positions[slot])
            self._check_run(chunk, field, position, lengths.get(slot, int(self._table_lengths[slot])))
            chunks.append(
                (chunk, read_ids(chunk.token_ids, limit=self._vocab_size, field=f"{field}.token_ids"))
            )
        return chunks

    def _check_run(self, chunk: PrefillChunk, field: str, position: int, table_length: int) -> None:
        if not chunk.token_ids:
            raise InvalidArgument(
                f"{field}.token_ids is empty; a chunk has at least one", field=f"{field}.token_ids"
            )
        if chunk.start != position:
            raise InvalidArgument(
                f"{field}.start is {chunk.start}; slot {chunk.slot} is at position {position}",
                field=f"{field}.start",
            )
        end, room = position + len(chunk.token_ids), table_length * self._page_size
        if end > room:
            raise InvalidArgument(
                f"{field} ends at position {end}; the pages of slot {chunk.slot} hold {room} tokens. "
                "Append pages first",
                field=f"{field}.token_ids",
            )

    def _check_decode_room(self, lengths: dict[int, int], released: frozenset[int]) -> None:
        """Every decoding slot must have a page for its next token."""
        cache = self._decode_cache()
        slots = cache.rows.slots
        full = slots[np.take(self._positions, slots) >= cache.capacity]
        for slot in full.tolist():
            position = int(self._positions[slot])
            room = lengths.get(slot, int(self._table_lengths[slot])) * self._page_size
            if slot not in released and position >= room:
                raise InvalidArgument(
                    f"slot {slot} decodes position {position}; its pages hold {room} tokens. "
                    f"Append a page first",
                    field="plan.pages",
                )

    # ---- state

    def _release(self, slot: int) -> None:
        self._occupied[slot] = False
        self._table_lengths[slot] = 0
        self._positions[slot] = 0
        self.stop_decoding(slot)

    def _admit(self, admission: SlotAdmission, page_ids: IntArray) -> None:
        self._occupied[admission.slot] = True
        self._positions[admission.slot] = admission.cached_tokens
        self._append_pages(admission.slot, page_ids)

    def _append_pages(self, slot: int, page_ids: IntArray) -> None:
        start = int(self._table_lengths[slot])
        end = start + len(page_ids)
        if end > self._tables.shape[1]:
            self._widen(end)
        self._tables[slot, start:end] = page_ids
        self._table_lengths[slot] = end
        if self._decoding[slot] and self._cache is not None:
            self._append_to_cache(self._cache, slot, start, page_ids)

    def _widen(self, length: int) -> None:
        width = max(_round_up(length), self._tables.shape[1] * 2)
        tables: IntArray = np.zeros((self._max_slots, width), dtype=np.int32)
        tables[:, : self._tables.shape[1]] = self._tables
        self._tables = tables

    def _append_to_cache(self, cache: _DecodeCache, slot: int, start: int, page_ids: IntArray) -> None:
        end = start + len(page_ids)
        if end > cache.rows.page_table.shape[1]:
            self._cache = None
            return
        row = int(np.searchsorted(cache.rows.slots, slot))
        cache.rows.page_table[row, start:end] = page_ids
        cache.capacity[row] = end * self._page_size

    def _decode_cache(self) -> _DecodeCache:
        if self._cache is None:
            slots: IntArray = np.flatnonzero(self._decoding).astype(np.int32)
            lengths = self._table_lengths[slots]
            width = _round_up(int(lengths.max())) if slots.size else 0
            table = self._tables[slots, :width]
            # A slot's row may hold pages of the request before it, past its own.
            table[np.arange(table.shape[1]) >= lengths[:, None]] = 0
            rows = DecodeRows(slots=slots, positions=np.empty_like(slots), page_table=table)
            self._cache = _DecodeCache(rows=rows, capacity=lengths * np.int32(self._page_size))
        return self._cache

    def _take_decode_rows(self, decode: bool) -> DecodeRows | None:
        if not decode:
            return None
        rows = self._decode_cache().rows
        if not rows.slots.size:
            return None
        np.take(self._positions, rows.slots, out=rows.positions)
        self._positions[rows.slots] += 1
        return rows

    def _take_chunk(self, chunk: PrefillChunk, token_ids: IntArray) -> PrefillRow:
        slot = chunk.slot
        self._positions[slot] += len(token_ids)
        if chunk.last:
            self._decoding[slot] = True
            self._cache = None
        return PrefillRow(
            slot=slot,
            start=chunk.start,
            token_ids=token_ids,
            page_ids=self.page_table(slot),
            samples=chunk.last,
        )


def _round_up(length: int) -> int:
    return -(-length // _WIDTH_STEP) * _WIDTH_STEP


def _batch(decode: DecodeRows | None, prefill: Sequence[PrefillRow]) -> StepBatch | None:
    return StepBatch(decode=decode, prefill=prefill) if decode is not None or prefill else None
