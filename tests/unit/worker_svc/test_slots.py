"""SlotTable applies step plans in the order of their fields, and refuses the wrong ones whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from chipmesh.device.v1alpha1.execution_pb2 import AdmittedRequest, PageDelta, PrefillChunk, StepPlan
from chipmesh.device.v1alpha1.sampling_pb2 import SamplingParameters
from meshkit.errors import Aborted, InvalidArgument
from plugins.sdk.runner import DecodeRows
from worker_svc.slots import AppliedPlan, SlotTable

EPOCH = 7
GREEDY = SamplingParameters(top_p=1.0, repetition_penalty=1.0)


def admit(slot: int, pages: Sequence[int] = (), *, cached: int = 0) -> AdmittedRequest:
    return AdmittedRequest(slot=slot, sampling=GREEDY, page_ids=pages, cached_tokens=cached)


def chunk(slot: int, start: int, tokens: Sequence[int], *, last: bool = True) -> PrefillChunk:
    return PrefillChunk(slot=slot, start=start, token_ids=tokens, last=last)


class Driver:
    """Sends plans with the right epoch and number to a table."""

    def __init__(self) -> None:
        self.table = SlotTable(page_count=40, page_size=4, max_slots=4, vocab_size=100)
        self.table.reset(epoch=EPOCH)
        self.step_seq = 0

    def __call__(
        self,
        *,
        released: Sequence[int] = (),
        admitted: Sequence[AdmittedRequest] = (),
        pages: Sequence[tuple[int, Sequence[int]]] = (),
        prefill: Sequence[PrefillChunk] = (),
        decode: bool = False,
    ) -> AppliedPlan:
        plan = StepPlan(
            epoch=EPOCH,
            step_seq=self.step_seq + 1,
            released_slots=released,
            admitted=admitted,
            pages=[PageDelta(slot=slot, page_ids=ids) for slot, ids in pages],
            prefill=prefill,
            decode=decode,
        )
        applied = self.table.apply(plan)
        self.step_seq += 1
        return applied


@pytest.fixture
def send() -> Driver:
    return Driver()


def decode_rows(applied: AppliedPlan) -> DecodeRows:
    assert applied.batch is not None
    assert applied.batch.decode is not None
    return applied.batch.decode


def test_a_slot_decodes_from_the_step_after_its_last_chunk(send: Driver) -> None:
    first = send(admitted=[admit(2, [5, 9])], prefill=[chunk(2, 0, [1, 2, 3])], decode=True)
    assert first.batch is not None
    assert first.batch.decode is None
    assert first.batch.prefill[0].page_ids.tolist() == [5, 9]
    rows = decode_rows(send(decode=True))
    assert (rows.slots.tolist(), rows.positions.tolist()) == ([2], [3])
    assert rows.page_table[0, :2].tolist() == [5, 9]
    assert not rows.page_table[0, 2:].any()
    assert decode_rows(send(decode=True)).positions.tolist() == [4]


def test_chunks_before_the_last_do_not_sample_or_decode(send: Driver) -> None:
    send(admitted=[admit(0, [1, 2])], prefill=[chunk(0, 0, [1, 2, 3], last=False)])
    applied = send(prefill=[chunk(0, 3, [4, 5])], decode=True)
    assert applied.batch is not None
    assert applied.batch.decode is None
    assert [(row.start, row.samples) for row in applied.batch.prefill] == [(3, True)]


def test_released_slots_are_free_for_admissions_of_the_same_plan(send: Driver) -> None:
    send(admitted=[admit(0, [1])], prefill=[chunk(0, 0, [1])])
    applied = send(released=[0], admitted=[admit(0, [3])], prefill=[chunk(0, 0, [9])], decode=True)
    assert list(applied.released) == [0]
    assert applied.admitted[0][1].tolist() == [3]
    assert applied.batch is not None
    assert applied.batch.decode is None


def test_an_unchanged_batch_reuses_its_arrays(send: Driver) -> None:
    send(
        admitted=[admit(0, range(5)), admit(1, range(5, 10))], prefill=[chunk(0, 0, [1]), chunk(1, 0, [1, 2])]
    )
    before = decode_rows(send(decode=True))
    table = before.page_table
    after = decode_rows(send(decode=True))
    assert after.page_table is table
    assert after.positions.tolist() == [2, 3]


def test_a_page_appended_while_decoding_reaches_the_cached_rows(send: Driver) -> None:
    send(admitted=[admit(0, [1]), admit(3, [2])], prefill=[chunk(0, 0, [1] * 4), chunk(3, 0, [1])])
    rows = decode_rows(send(pages=[(0, [7])], decode=True))
    assert rows.page_table[0, :2].tolist() == [1, 7]
    rows = decode_rows(send(pages=[(3, [8, 9])], decode=True))
    assert rows.page_table[:, :3].tolist() == [[1, 7, 0], [2, 8, 9]]


def test_rows_grow_beyond_their_first_width(send: Driver) -> None:
    send(admitted=[admit(0, range(16))], prefill=[chunk(0, 0, [1] * 64)])
    rows = decode_rows(send(pages=[(0, range(16, 20))], decode=True))
    assert rows.page_table[0, :20].tolist() == list(range(20))
    assert rows.positions.tolist() == [64]


def test_a_row_holds_no_page_of_the_request_before_it(send: Driver) -> None:
    send(admitted=[admit(0, [1, 2, 3])], prefill=[chunk(0, 0, [1])])
    send(released=[0], admitted=[admit(0, [4])], prefill=[chunk(0, 0, [1])])
    assert decode_rows(send(decode=True)).page_table[0].tolist() == [4] + [0] * 15


def test_a_failed_slot_makes_no_more_tokens_and_keeps_its_place(send: Driver) -> None:
    send(admitted=[admit(0, [1]), admit(1, [2])], prefill=[chunk(0, 0, [1]), chunk(1, 0, [1])])
    send.table.stop_decoding(0)
    assert decode_rows(send(decode=True)).slots.tolist() == [1]
    assert send.table.occupied == 2
    send(released=[0])
    assert send.table.occupied == 1


def test_a_cached_prefix_sets_the_position(send: Driver) -> None:
    send(admitted=[admit(0, [3, 4, 5], cached=8)], prefill=[chunk(0, 8, [1])])
    assert send.table.position(0) == 9


def test_a_plan_that_only_releases_computes_nothing(send: Driver) -> None:
    send(admitted=[admit(0, [1])], prefill=[chunk(0, 0, [1])])
    assert send(released=[0]).batch is None
    assert send(decode=True).batch is None


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (StepPlan(epoch=EPOCH, step_seq=2), "step_seq"),
        (StepPlan(epoch=EPOCH, step_seq=0), "step_seq"),
        (StepPlan(epoch=EPOCH - 1, step_seq=1), "epoch"),
        (StepPlan(epoch=EPOCH + 1, step_seq=1), "epoch"),
    ],
)
def test_a_wrong_epoch_or_number_is_aborted(plan: StepPlan, word: str) -> None:
    with pytest.raises(Aborted, match=word):
        Driver().table.apply(plan)


def test_a_plan_applied_twice_is_aborted(send: Driver) -> None:
    plan = StepPlan(epoch=EPOCH, step_seq=1)
    send.table.apply(plan)
    with pytest.raises(Aborted):
        send.table.apply(plan)


Wrong = Callable[[Driver], AppliedPlan]
WRONG: dict[str, Wrong] = {
    "released_slots": lambda send: send(released=[2]),
    "released_slots out of range": lambda send: send(released=[4]),
    "released_slots twice": lambda send: send(released=[0, 0]),
    "admitted[0].slot": lambda send: send(admitted=[admit(0, [9])]),
    "admitted[0].slot out of range": lambda send: send(admitted=[admit(9, [9])]),
    "admitted[1].slot": lambda send: send(admitted=[admit(2, [9]), admit(2, [8])]),
    "admitted[0].page_ids": lambda send: send(admitted=[admit(2, [40])]),
    "admitted[0].cached_tokens": lambda send: send(admitted=[admit(2, [1], cached=5)]),
    "admitted[0].sampling": lambda send: send(admitted=[AdmittedRequest(slot=2, page_ids=[1])]),
    "admitted[0].sampling.top_p": lambda send: send(
        admitted=[AdmittedRequest(slot=2, sampling=SamplingParameters(repetition_penalty=1.0))]
    ),
    "pages[0].slot": lambda send: send(pages=[(3, [1])]),
    "pages[0].slot of one released": lambda send: send(released=[0], pages=[(0, [1])]),
    "pages[0].page_ids": lambda send: send(pages=[(0, [4_000_000_000])]),
    "pages": lambda send: send(pages=[(0, [1] * 40)]),
    "prefill[0].slot": lambda send: send(prefill=[chunk(3, 0, [1])]),
    "prefill[0].slot that decodes": lambda send: send(prefill=[chunk(0, 4, [1])]),
    "prefill[1].slot": lambda send: send(
        admitted=[admit(2, [9])], prefill=[chunk(2, 0, [1], last=False), chunk(2, 1, [1])]
    ),
    "prefill[0].start": lambda send: send(prefill=[chunk(1, 3, [1])]),
    "prefill[0].token_ids": lambda send: send(prefill=[chunk(1, 2, [])]),
    "prefill[0].token_ids too many": lambda send: send(prefill=[chunk(1, 2, [1] * 3)]),
    "prefill[0].token_ids unknown": lambda send: send(prefill=[chunk(1, 2, [100])]),
    "pages for decode": lambda send: send(decode=True),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_names_its_field_and_changes_nothing(case: str, send: Driver) -> None:
    # Slot 0 decodes and has filled its page; slot 1 is in the middle of its prompt.
    send(
        admitted=[admit(0, [0]), admit(1, [1])],
        prefill=[chunk(0, 0, [1, 2, 3, 4]), chunk(1, 0, [1, 2], last=False)],
    )
    with pytest.raises(InvalidArgument) as refused:
        WRONG[case](send)
    assert refused.value.field == f"plan.{case.split(' ', maxsplit=1)[0]}"
    rows = decode_rows(send(pages=[(0, [2])], prefill=[chunk(1, 2, [5])], decode=True))
    assert (rows.slots.tolist(), rows.positions.tolist()) == ([0], [4])
    assert decode_rows(send(decode=True)).positions.tolist() == [5, 3]


def test_reset_drops_all_slots_and_starts_a_new_epoch(send: Driver) -> None:
    send(admitted=[admit(0, [1])], prefill=[chunk(0, 0, [1])])
    send.table.reset(epoch=EPOCH + 1)
    assert send.table.occupied == 0
    applied = send.table.apply(StepPlan(epoch=EPOCH + 1, step_seq=1, decode=True))
    assert applied.batch is None


def test_ids_near_the_edge_of_uint32_are_refused_not_wrapped(send: Driver) -> None:
    with pytest.raises(InvalidArgument, match="4294967295"):
        send(admitted=[admit(2, [2**32 - 1])])
    assert np.array_equal(send.table.page_table(2), np.empty(0, dtype=np.int32))
