"""SlotTable against a plain model of it, over random lives of requests and random garbage."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from chipmesh.device.v1alpha1.execution_pb2 import AdmittedRequest, PageDelta, PrefillChunk, StepPlan
from chipmesh.device.v1alpha1.sampling_pb2 import SamplingParameters
from meshkit.errors import MeshError
from plugins.sdk.runner import DecodeRows
from worker_svc.slots import SlotTable

PAGES, PAGE, SLOTS, VOCAB = 24, 3, 5, 50
GREEDY = SamplingParameters(top_p=1.0, repetition_penalty=1.0)


@dataclass
class Life:
    """What a slot should hold."""

    pages: list[int]
    position: int
    decoding: bool = False
    started: bool = field(default=False)


class SlotLives(RuleBasedStateMachine):
    """Each rule puts something into the next plan; `send` applies it and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(page_count=PAGES, page_size=PAGE, max_slots=SLOTS, vocab_size=VOCAB)
        self.table.reset(epoch=1)
        self.lives: dict[int, Life] = {}
        self.fresh: dict[int, Life] = {}
        self.plan = StepPlan(epoch=1, step_seq=1)

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        # Field order: a release comes before all else of its plan, so only slots untouched by it may go.
        touched = {delta.slot for delta in self.plan.pages} | {chunk.slot for chunk in self.plan.prefill}
        if slot in self.lives and slot not in touched and slot not in self.plan.released_slots:
            self.plan.released_slots.append(slot)
            del self.lives[slot]

    @rule(
        slot=st.integers(0, SLOTS - 1), pages=st.lists(st.integers(0, PAGES - 1), max_size=4), data=st.data()
    )
    def admit(self, slot: int, pages: list[int], data: st.DataObject) -> None:
        if slot in self.lives or slot in self.fresh:
            return
        cached = data.draw(st.integers(0, len(pages) * PAGE))
        self.plan.admitted.append(
            AdmittedRequest(slot=slot, sampling=GREEDY, page_ids=pages, cached_tokens=cached)
        )
        self.fresh[slot] = Life(list(pages), cached)

    @rule(slot=st.integers(0, SLOTS - 1), pages=st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=3))
    def append(self, slot: int, pages: list[int]) -> None:
        life = self.lives.get(slot) or self.fresh.get(slot)
        if life is not None and len(life.pages) + len(pages) <= PAGES:
            self.plan.pages.append(PageDelta(slot=slot, page_ids=pages))
            life.pages += pages

    @rule(slot=st.integers(0, SLOTS - 1), last=st.booleans(), data=st.data())
    def prefill(self, slot: int, last: bool, data: st.DataObject) -> None:
        life = self.lives.get(slot) or self.fresh.get(slot)
        if life is None or life.decoding or any(chunk.slot == slot for chunk in self.plan.prefill):
            return
        room = len(life.pages) * PAGE - life.position
        if room < 1:
            return
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=room))
        self.plan.prefill.append(PrefillChunk(slot=slot, start=life.position, token_ids=tokens, last=last))

    @precondition(lambda self: self._room_to_decode())
    @rule()
    def decode(self) -> None:
        self.plan.decode = True

    def _room_to_decode(self) -> bool:
        return all(life.position < len(life.pages) * PAGE for life in self.lives.values() if life.decoding)

    @rule()
    def send(self) -> None:
        applied = self.table.apply(self.plan)
        assert [admission.slot for admission, _ in applied.admitted] == list(self.fresh)
        self.lives.update(self.fresh)
        self._expect_decode(applied.batch.decode if applied.batch is not None else None)
        for index, chunk in enumerate(self.plan.prefill):
            assert applied.batch is not None
            row, life = applied.batch.prefill[index], self.lives[chunk.slot]
            assert (row.slot, row.start, row.samples) == (chunk.slot, life.position, chunk.last)
            assert row.page_ids.tolist() == life.pages
            life.position += len(chunk.token_ids)
            life.decoding = chunk.last
        for slot, life in self.lives.items():
            assert self.table.position(slot) == life.position
            assert self.table.page_table(slot).tolist() == life.pages
        assert self.table.occupied == len(self.lives)
        self.fresh = {}
        self.plan = StepPlan(epoch=1, step_seq=self.plan.step_seq + 1)

    def _expect_decode(self, rows: object) -> None:
        decoding = (
            sorted(slot for slot, life in self.lives.items() if life.decoding) if self.plan.decode else []
        )
        if not decoding:
            assert rows is None
            return
        assert isinstance(rows, DecodeRows)
        assert rows.slots.tolist() == decoding
        assert rows.positions.tolist() == [self.lives[slot].position for slot in decoding]
        for row, slot in zip(rows.page_table.tolist(), decoding, strict=True):
            pages = self.lives[slot].pages
            assert row[: len(pages)] == pages
            assert not any(row[len(pages) :])
            self.lives[slot].position += 1


TestSlotLives = SlotLives.TestCase

small = st.integers(0, 6)
plans = st.builds(
    StepPlan,
    epoch=st.just(1),
    step_seq=st.just(1),
    released_slots=st.lists(small, max_size=2),
    admitted=st.lists(
        st.builds(
            AdmittedRequest,
            slot=small,
            sampling=st.sampled_from([GREEDY, SamplingParameters(top_p=float("nan"))]),
            cached_tokens=st.integers(0, 20),
            page_ids=st.lists(st.integers(0, 30), max_size=4),
        ),
        max_size=2,
    ),
    pages=st.lists(
        st.builds(PageDelta, slot=small, page_ids=st.lists(st.integers(0, 30), max_size=4)), max_size=2
    ),
    prefill=st.lists(
        st.builds(
            PrefillChunk,
            slot=small,
            start=small,
            token_ids=st.lists(st.integers(0, 60), max_size=4),
            last=st.booleans(),
        ),
        max_size=2,
    ),
    decode=st.booleans(),
)


@settings(max_examples=300)
@given(plans)
def test_any_plan_is_applied_or_refused_with_a_field(plan: StepPlan) -> None:
    table = SlotTable(page_count=PAGES, page_size=PAGE, max_slots=SLOTS, vocab_size=VOCAB)
    table.reset(epoch=1)
    table.apply(
        StepPlan(
            epoch=1,
            step_seq=1,
            admitted=[
                AdmittedRequest(slot=1, sampling=GREEDY, page_ids=[1]),
                AdmittedRequest(slot=2, sampling=GREEDY),
            ],
            prefill=[PrefillChunk(slot=1, start=0, token_ids=[1, 2, 3], last=True)],
        )
    )
    plan.step_seq = 2
    refusal = refusal_of(table, plan)
    if refusal is not None:
        assert refusal.field is not None
        assert (table.occupied, table.position(1)) == (2, 3)
        table.apply(StepPlan(epoch=1, step_seq=2))


def refusal_of(table: SlotTable, plan: StepPlan) -> MeshError | None:
    try:
        table.apply(plan)
    except MeshError as error:
        return error
    return None
