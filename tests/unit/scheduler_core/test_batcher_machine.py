"""Random histories over batcher, tree and ledger: exact tokens, every page and slot accounted for, always."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.errors import RequestTooLarge
from scheduler_svc.core.policy import POLICIES
from scheduler_svc.core.structures import Finished, FinishReason, Request
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request, oracle

# Prompts are cut from a few long texts, so that they share prefixes of all lengths.
TEXTS = [[(7 * text + position * (text + 3)) % 61 for position in range(96)] for text in range(3)]
SALTS = st.sampled_from(["", "", "", "tenant"])


class BatcherMachine(RuleBasedStateMachine):
    """Submits, plans, applies, cancels, loses, flushes in any order; the executor's tokens are the judge."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        tokens=st.sampled_from([12, 24, 48, 96, 160]),
        slots=st.integers(1, 6),
        chunk=st.sampled_from([1, 5, 16, 64]),
        radix=st.sampled_from([True, True, True, False]),
        mixed=st.sampled_from([True, True, False]),
        least=st.sampled_from([0, 0, 6]),
        depth=st.integers(1, 3),
        policy=st.sampled_from(sorted(POLICIES)),
        conservativeness=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def start(
        self, page_size: int, tokens: int, slots: int, chunk: int, radix: bool, mixed: bool, least: int,
        depth: int, policy: str, conservativeness: float,
    ) -> None:  # fmt: skip
        self.limits = make_limits(
            page_count=max(2, tokens // page_size),
            page_size=page_size,
            max_running_requests=slots,
            chunk_tokens=chunk,
            enable_radix_cache=radix,
            enable_mixed_chunk=mixed,
            min_cached_tokens=least,
        )
        self.depth, self.policy, self.conservativeness = depth, policy, conservativeness
        self.drive = self.make_drive()
        self.live: dict[int, Request] = {}

    def make_drive(self) -> Drive:
        return Drive(
            self.limits, depth=self.depth, policy=self.policy, conservativeness=self.conservativeness
        )

    @rule(
        text=st.integers(0, 2),
        length=st.one_of(st.integers(1, 8), st.integers(1, 80)),
        tails=st.lists(st.lists(st.integers(0, 60), max_size=3), min_size=1, max_size=4),
        output=st.integers(1, 40),
        done=st.integers(0, 6),
        stops=st.sampled_from([(), (), (3, 11, 40), tuple(range(24))]),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=SALTS,
    )
    def submit(
        self, text: int, length: int, tails: list[list[int]], output: int, done: int,
        stops: tuple[int, ...], priority: int, salt: str,
    ) -> None:  # fmt: skip
        for tail in tails:
            self.submit_one(TEXTS[text][:length] + tail, output, done, stops, priority, salt)

    def submit_one(
        self, prompt: list[int], output: int, done: int, stops: tuple[int, ...], priority: int, salt: str
    ) -> None:
        made = oracle(prompt, min(done, output - 1), stops)
        if made and made[-1] in stops:
            return  # It has ended already: nobody resubmits it.
        request = make_request(prompt, output, stops=stops, output=made, priority=priority, salt=salt)
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
                self.drive.plan()

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
        self.drive.batcher.check_identity()
        pages = self.drive.batcher.pages
        assert pages.free + pages.cached + pages.held == pages.total
        batcher = self.drive.batcher
        assert batcher.running + batcher.waiting == len(set(self.live) - set(self.drive.ended))
        assert batcher.steps_in_flight == len(self.drive.results)

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.executor.fail_next.clear()
        self.drive.finish()
        for request in self.live.values():
            if self.drive.reason(request) in ("stop", "length"):
                room = self.limits.page_count * self.limits.page_size - len(request.prompt)
                most = min(request.max_output_tokens, room)
                assert request.output == oracle(request.prompt, most, request.stop_token_ids)


# The ci profile's 50 examples are too few for a core: 400 of 50 steps are 20,000 steps, in some 15 s.
# The nightly profile's 5,000 of 200 are a million.
PROFILE = settings()
BatcherMachine.TestCase.settings = settings(
    max_examples=max(400, PROFILE.max_examples), stateful_step_count=max(50, PROFILE.stateful_step_count)
)
TestBatcherMachine = BatcherMachine.TestCase
