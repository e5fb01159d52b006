"""An executor that keeps the step protocol strictly, and a model whose tokens show any wrong page.

A token is a hash of all tokens before it, read back through the slot's page table each time. Whatever goes
wrong (a page given to two, a slot mixed up, a replay from the wrong place) changes all tokens that follow.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.policy import SchedulePolicy, make_policy
from scheduler_svc.core.structures import (
    Admission,
    Event,
    Failed,
    Finished,
    Placed,
    ReplicaId,
    ReplicaLimits,
    Request,
    RequestId,
    SlotFailure,
    StepPlan,
    StepResult,
    TokensMade,
)
from scheduler_svc.core.waiting_queue import PATIENCE

VOCABULARY = 64


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("I", tokens).tobytes()) % VOCABULARY


def oracle(request_prompt: Sequence[int], count: int, stops: Iterable[int] = ()) -> list[int]:
    """What the model answers, without pages, slots or steps."""
    tokens, answer, ends = list(request_prompt), [], frozenset(stops)
    for _ in range(count):
        answer.append(next_token(tokens))
        tokens.append(answer[-1])
        if answer[-1] in ends:
            break
    return answer


_numbers = itertools.count(1)


def make_request(
    prompt: Sequence[int],
    max_output_tokens: int = 8,
    *,
    stops: Iterable[int] = (),
    output: Sequence[int] = (),
    priority: int = 0,
    salt: str = "",
    adapter: str = "",
) -> Request:
    return Request(
        RequestId(next(_numbers)), "m", list(prompt), max_output_tokens, frozenset(stops), list(output),
        priority, salt, adapter=adapter,
    )  # fmt: skip


def make_limits(
    *,
    page_count: int = 64,
    page_size: int = 4,
    max_running_requests: int = 8,
    chunk_tokens: int = 64,
    context_tokens: int = 10_000,
    enable_radix_cache: bool = True,
    enable_mixed_chunk: bool = True,
    min_cached_tokens: int = 0,
    eviction_policy: str = "lru",
    priority_preemption: bool = False,
    preemption_threshold: int = 1,
    enable_kv_events: bool = False,
) -> ReplicaLimits:
    return ReplicaLimits(
        page_count, page_size, max_running_requests, chunk_tokens, context_tokens,
        enable_radix_cache, enable_mixed_chunk, min_cached_tokens,
        eviction_policy, priority_preemption, preemption_threshold, enable_kv_events,
    )  # fmt: skip


@dataclass
class _Slot:
    admission: Admission
    pages: list[int]
    position: int
    last_token: int | None = None
    """Set while it decodes."""


@dataclass
class SimulatedExecutor:
    """Applies plans in order; anything that the protocol forbids is an AssertionError."""

    limits: ReplicaLimits
    slots: dict[int, _Slot] = field(default_factory=dict)
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    step_seq: int = 0
    fail_next: set[int] = field(default_factory=set)
    """Slots that fail in the next step in which they compute."""
    failed: set[int] = field(default_factory=set)
    computed_tokens: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.step_seq += 1
        assert plan.step_seq == self.step_seq
        self._change_slots(plan)
        sampled: list[tuple[int, int]] = []
        failures: list[SlotFailure] = []
        if plan.decode:
            decoding = sorted(number for number, slot in self.slots.items() if slot.last_token is not None)
            assert decoding or self.failed, "a decode step over no slot"
            for number in decoding:
                slot = self.slots[number]
                assert slot.last_token is not None
                self._write(number, slot, slot.last_token)
                self._sample(number, slot, sampled, failures)
        self._prefill(plan, sampled, failures)
        return StepResult(
            plan.step_seq, [slot for slot, _ in sampled], [token for _, token in sampled], (), tuple(failures)
        )

    def _change_slots(self, plan: StepPlan) -> None:
        for number in plan.released_slots:
            del self.slots[number]
            self.failed.discard(number)
        for admission in plan.admitted:
            assert 0 <= admission.slot < self.limits.max_running_requests
            assert admission.slot not in self.slots, "a slot that is taken"
            assert admission.output_count == len(admission.request.output)
            assert admission.cached_tokens < admission.request.length, "nothing left to compute"
            self.slots[admission.slot] = _Slot(admission, [], admission.cached_tokens)
            self._append(admission.slot, admission.page_ids)
        for delta in plan.pages:
            assert delta.page_ids, "an empty delta"
            self._append(delta.slot, delta.page_ids)

    def _append(self, number: int, pages: Sequence[int]) -> None:
        assert all(0 <= page < self.limits.page_count for page in pages)
        self.slots[number].pages += pages
        assert len(set(self.slots[number].pages)) == len(self.slots[number].pages), "a page twice in a table"

    def _prefill(self, plan: StepPlan, sampled: list[tuple[int, int]], failures: list[SlotFailure]) -> None:
        total = 0
        for chunk in plan.prefill:
            slot = self.slots[chunk.slot]
            assert slot.last_token is None, "a chunk for a slot that decodes"
            assert chunk.start == slot.position, "a chunk that is not the next one"
            assert chunk.token_ids, "an empty chunk"
            total += len(chunk.token_ids)
            for token in chunk.token_ids:
                self._write(chunk.slot, slot, token)
            if chunk.last or chunk.slot in self.fail_next:
                self._sample(chunk.slot, slot, sampled, failures)
        assert total <= self.limits.chunk_tokens
        self.computed_tokens += total

    def _write(self, number: int, slot: _Slot, token: int) -> None:
        index, offset = divmod(slot.position, self.limits.page_size)
        assert index < len(slot.pages), f"slot {number} has no page for position {slot.position}"
        page = slot.pages[index]
        readers = [other for other, state in self.slots.items() if page in state.pages and other != number]
        assert not readers, f"slot {number} writes page {page}, which slots {readers} read"
        self.cells[page, offset] = token
        slot.position += 1

    def _sample(
        self, number: int, slot: _Slot, sampled: list[tuple[int, int]], failures: list[SlotFailure]
    ) -> None:
        if number in self.failed:
            return
        if number in self.fail_next:
            self.fail_next.discard(number)
            self.failed.add(number)
            slot.last_token = None
            failures.append(SlotFailure(slot.admission.slot, "NON_FINITE_LOGITS", "made to fail"))
            return
        slot.last_token = next_token(self._read(slot))
        sampled.append((number, slot.last_token))

    def _read(self, slot: _Slot) -> list[int]:
        size = self.limits.page_size
        return [self.cells[slot.pages[i // size], i % size] for i in range(slot.position)]


class Drive:
    """A batcher and an executor with up to `depth` steps between them. Every event is checked on its way."""

    def __init__(
        self,
        limits: ReplicaLimits,
        *,
        depth: int = 2,
        policy: str | SchedulePolicy = "fcfs",
        conservativeness: float = 1.0,
        patience: int = PATIENCE,
    ) -> None:
        self.depth = depth
        self.batcher = Batcher(
            limits=limits,
            policy=make_policy(policy) if isinstance(policy, str) else policy,
            replica=ReplicaId("r0/1"),
            conservativeness=conservativeness,
            patience=patience,
        )
        self.executor = SimulatedExecutor(limits)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.events: list[Event] = []
        self.ended: dict[int, Event] = {}
        self.told: Counter[int] = Counter()
        """Tokens by request id."""

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.batcher.add(request)

    def plan(self) -> StepPlan | None:
        plan = self.batcher.plan()
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.executor.execute(plan))
        self.take(self.batcher.take_events())
        return plan

    def apply(self) -> None:
        self.take(self.batcher.apply(self.results.popleft()))

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            told = event.requests if isinstance(event, TokensMade) else [event.request]
            assert self.ended.keys().isdisjoint(request.id for request in told), "an event after the last one"
            if isinstance(event, TokensMade):
                self._check_tokens(event)
            elif not isinstance(event, Placed):
                self.ended[event.request.id] = event
            self.events.append(event)

    def _check_tokens(self, event: TokensMade) -> None:
        assert len(event.logprobs) in (0, len(event.requests))
        for request, token in zip(event.requests, event.token_ids, strict=True):
            expected = oracle(request.prompt, len(request.output), request.stop_token_ids)
            assert request.output == expected
            assert token == expected[-1]
            self.told[request.id] += 1

    def run(self, until: Callable[[], bool] | None = None, *, most_steps: int = 5000) -> None:
        """Plan and apply as the shell does, until nothing is to do or `until()` holds."""
        for _ in range(most_steps):
            if until is not None and until():
                return
            while len(self.results) < self.depth and self.plan() is not None:
                pass
            if not self.results:
                assert until is None, "idle before the condition held"
                return
            self.apply()
            self.batcher.check_identity()
        raise AssertionError(f"not done after {most_steps} steps: {self.batcher!r}")

    def finish(self, *, most_steps: int = 5000) -> None:
        """Run to the end; then nothing may be left behind."""
        self.run(most_steps=most_steps)
        pages = self.batcher.pages
        assert (self.batcher.running, self.batcher.waiting, pages.held) == (0, 0, 0)
        assert not self.executor.slots
        self.batcher.check_identity()

    def placed(self, request: Request) -> list[Placed]:
        return [event for event in self.events if isinstance(event, Placed) and event.request is request]

    def order_of_admission(self) -> list[Request]:
        return [event.request for event in self.events if isinstance(event, Placed)]

    def reason(self, request: Request) -> str:
        event = self.ended[request.id]
        assert isinstance(event, (Finished, Failed))
        return event.reason.value if isinstance(event, Finished) else event.reason
