"""Random histories over batcher, tree and ledger: exact tokens, every page and slot accounted for, always."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.errors import RequestTooLarge
from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.policy import POLICIES, make_policy
from scheduler_svc.core.structures import Finished, FinishReason, Request
from scheduler_svc.core.waiting_queue import PATIENCE
from tests.unit.scheduler_core.block_reader import BlockReader
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request, oracle

# Prompts are cut from a few long texts, so that they share prefixes of all lengths.
TEXTS = [[(7 * text + position * (text + 3)) % 61 for position in range(96)] for text in range(3)]
SPACES = st.sampled_from(
    [("", ""), ("", ""), ("", ""), ("tenant", ""), ("", "adapter"), ("tenant", "adapter")]
)


_STEPS_OF_A_ROUND = 100_000


class BatcherMachine(RuleBasedStateMachine):
    """Submits, plans, applies, cancels, loses, flushes in any order; the executor's tokens are the judge."""

    steps = 0
    """Of all histories; a step is one of the rules."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        tokens=st.sampled_from([12, 24, 48, 96, 160]),
        slots=st.integers(1, 6),
        chunk=st.sampled_from([1, 5, 16, 64]),
        radix=st.sampled_from([True, True, True, False]),
        mixed=st.sampled_from([True, True, False]),
        least=st.sampled_from([0, 0, 6]),
        depth=st.sampled_from([1, 2, 3, 9, 32]),
        policy=st.sampled_from(sorted(POLICIES)),
        conservativeness=st.sampled_from([0.0, 0.0, 1.0]),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
        preemption=st.sampled_from([0, 0, 1, 2]),
        patience=st.sampled_from([0, 3, PATIENCE]),
        kv_events=st.booleans(),
    )
    def start(
        self, page_size: int, tokens: int, slots: int, chunk: int, radix: bool, mixed: bool, least: int,
        depth: int, policy: str, conservativeness: float, eviction: str, preemption: int, patience: int,
        kv_events: bool,
    ) -> None:  # fmt: skip
        self.limits = make_limits(
            page_count=max(2, tokens // page_size),
            page_size=page_size,
            max_running_requests=slots,
            chunk_tokens=chunk,
            enable_radix_cache=radix,
            enable_mixed_chunk=mixed,
            min_cached_tokens=least,
            eviction_policy=eviction,
            priority_preemption=preemption > 0,
            preemption_threshold=max(1, preemption),
            enable_kv_events=kv_events,
        )
        self.depth, self.policy, self.conservativeness = depth, policy, conservativeness
        self.patience = patience
        self.drive = self.make_drive()
        self.live: dict[int, Request] = {}

    def make_drive(self) -> Drive:
        self.reader = BlockReader()
        return Drive(
            self.limits,
            depth=self.depth,
            policy=self.policy,
            conservativeness=self.conservativeness,
            patience=self.patience,
        )

    @rule(
        text=st.integers(0, 2),
        length=st.one_of(st.integers(1, 8), st.integers(1, 80)),
        tails=st.lists(st.lists(st.integers(0, 60), max_size=3), min_size=1, max_size=4),
        output=st.integers(1, 40),
        done=st.integers(0, 6),
        stops=st.sampled_from([(), (), (3, 11, 40), tuple(range(24))]),
        priority=st.sampled_from([0, 0, 0, 1, 2, -1]),
        space=SPACES,
    )
    def submit(
        self, text: int, length: int, tails: list[list[int]], output: int, done: int,
        stops: tuple[int, ...], priority: int, space: tuple[str, str],
    ) -> None:  # fmt: skip
        for tail in tails:
            self.submit_one(TEXTS[text][:length] + tail, output, done, stops, priority, space)

    def submit_one(
        self, prompt: list[int], output: int, done: int, stops: tuple[int, ...], priority: int,
        space: tuple[str, str],
    ) -> None:  # fmt: skip
        made = oracle(prompt, min(done, output - 1), stops)
        if made and made[-1] in stops:
            return  # It has ended already: nobody resubmits it.
        salt, adapter = space
        request = make_request(
            prompt, output, stops=stops, output=made, priority=priority, salt=salt, adapter=adapter
        )
        room = self.limits.page_count * self.limits.page_size
        if request.length + 1 > room:
            with pytest.raises(RequestTooLarge):
                self.drive.add(request)
            return
        self.drive.add(request)
        self.live[request.id] = request

    @rule(times=st.integers(1, 4))
    def plan(self, times: int) -> None:
        for _ in range(times):
            if len(self.drive.results) < self.depth:
                plan = self.drive.plan()
                if plan is not None and plan.admitted:
                    assert len(self.drive.batcher._slots.seats) <= self.limits.max_running_requests

    @rule(times=st.integers(1, 4))
    def apply(self, times: int) -> None:
        for _ in range(min(times, len(self.drive.results))):
            self.drive.apply()

    @rule(times=st.integers(1, 10))
    def run(self, times: int) -> None:
        for _ in range(times):
            self.plan(1)
            if len(self.drive.results) == self.depth:
                self.drive.apply()
            self.drive.batcher.check_identity()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        was_over = request.id in self.drive.ended
        events = self.drive.batcher.cancel(request)
        assert events == ([] if was_over else [Finished(request, FinishReason.CANCELLED)])
        self.drive.take(events)
        assert self.drive.batcher.cancel(request) == []

    @precondition(lambda self: self.drive.executor.slots)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        # Of slots that the batcher is about to release nothing is computed any more: then nothing fails.
        self.drive.executor.fail_next.add(data.draw(st.sampled_from(sorted(self.drive.executor.slots))))

    @rule(
        slots=st.integers(1, 8),
        chunk=st.sampled_from([1, 5, 16, 64]),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def change_settings(self, slots: int, chunk: int, policy: str) -> None:
        """As an operator does while requests run; the executor has more slots than the ceiling says."""
        self.limits = replace(self.limits, max_running_requests=slots, chunk_tokens=chunk)
        self.policy = policy
        self.drive.batcher.set_ceilings(max_running_requests=slots, chunk_tokens=chunk)
        self.drive.batcher.set_policy(make_policy(policy))
        self.drive.executor.limits = replace(self.limits, max_running_requests=8)

    @rule()
    def flush(self) -> None:
        before = self.drive.batcher.pages
        flushed = self.drive.batcher.flush_cache()
        after = self.drive.batcher.pages
        assert (after.free, after.cached) == (before.free + flushed, before.cached - flushed)

    @rule()
    def lose(self) -> None:
        """The replica dies and comes back empty, with another executor."""
        lost = self.drive.batcher.lose()
        assert {request.id for request in lost} == set(self.live) - set(self.drive.ended)
        pages = self.drive.batcher.pages
        assert (self.drive.batcher.running, self.drive.batcher.waiting, pages.held) == (0, 0, 0)
        ended = self.drive.ended
        self.drive = self.make_drive()
        self.drive.ended = ended
        self.drive.add(*lost)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "drive"):
            return
        BatcherMachine.steps += 1
        self.drive.batcher.check_identity()
        pages = self.drive.batcher.pages
        assert pages.free + pages.cached + pages.held == pages.total
        batcher = self.drive.batcher
        assert batcher.running + batcher.waiting == len(set(self.live) - set(self.drive.ended))
        assert batcher.steps_in_flight == len(self.drive.results)
        self.events_tell_what_is_cached()
        self.waiting_requests_know_what_is_cached()

    def events_tell_what_is_cached(self) -> None:
        """A reader of the KV events has as many blocks as there are pages, and each exactly once."""
        log = self.drive.batcher.kv_events
        if log is None:
            return
        self.reader.take(log.read(after_seq=self.reader.seq))
        assert len(self.reader.blocks) == self.drive.batcher.pages.cached

    def waiting_requests_know_what_is_cached(self) -> None:
        """Under a policy that depends on the cache: what a look-up would find, or the tree asks for one."""
        batcher = self.drive.batcher
        if not make_policy(self.policy).depends_on_cache:
            return
        stale = batcher._pool.tree._watch._stale
        for ticket in batcher._waiting:
            if not ticket.is_set_aside and ticket not in stale:
                assert ticket.cached_tokens == batcher.matched_tokens(ticket.request)

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.executor.fail_next.clear()
        # A long history leaves up to a hundred requests, and with chunks of one token each takes its length.
        self.drive.finish(most_steps=100_000)
        for request in self.live.values():
            if self.drive.reason(request) in ("stop", "length"):
                room = self.limits.page_count * self.limits.page_size - len(request.prompt)
                most = min(request.max_output_tokens, room)
                assert request.output == oracle(request.prompt, most, request.stop_token_ids)


def test_random_histories_break_nothing() -> None:
    """20,000 steps, in some 15 s; a million in the nightly profile."""
    profile = settings()
    wanted = max(20_000, profile.max_examples * profile.stateful_step_count)
    per_history = max(50, profile.stateful_step_count)
    BatcherMachine.steps = 0
    # In rounds, as hypothesis remembers all of a round. Some histories are shorter than they may be.
    for _ in range(-(-wanted // _STEPS_OF_A_ROUND)):
        histories = min(wanted, _STEPS_OF_A_ROUND) * 6 // (per_history * 5)
        run_state_machine_as_test(
            BatcherMachine, settings=settings(max_examples=histories, stateful_step_count=per_history)
        )
    assert BatcherMachine.steps >= wanted
