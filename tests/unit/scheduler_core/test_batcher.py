from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.errors import IdentityViolated, RequestTooLarge, ResultContradictsPlan, StepOutOfOrder
from scheduler_svc.core.structures import (
    Finished,
    FinishReason,
    Placed,
    ReplicaLimits,
    Slot,
    StepResult,
    TokensMade,
)
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request, oracle

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 32])


# ---------------------------------------------------------------- tokens and ends


@DEPTHS
def test_requests_of_all_lengths_get_exactly_the_models_tokens(depth: int) -> None:
    drive = Drive(make_limits(page_count=400, max_running_requests=16, chunk_tokens=23), depth=depth)
    requests = [make_request(range(length), 1 + length % 17) for length in range(1, 60, 3)]
    drive.add(*requests)
    drive.finish()
    for request in requests:
        assert request.output == oracle(request.prompt, request.max_output_tokens)
        assert drive.reason(request) == "length"


@DEPTHS
def test_a_stop_token_ends_a_request_and_nothing_after_it_is_told(depth: int) -> None:
    drive = Drive(make_limits(), depth=depth)
    answer = oracle([1, 2, 3], 20)
    stop = next(token for index, token in enumerate(answer) if index >= 3 and token not in answer[:index])
    request = make_request([1, 2, 3], 20, stops=[stop])
    drive.add(request)
    drive.finish()
    assert request.output == answer[: answer.index(stop) + 1]
    assert drive.reason(request) == "stop"


def test_a_budget_that_is_spent_by_steps_in_flight_is_not_decoded_past() -> None:
    drive = Drive(make_limits(), depth=2)
    request = make_request([1, 2, 3], 4)
    drive.add(request)
    drive.finish()
    assert sum(plan.decode for plan in drive.plans) == 3  # The prefill makes the first token.


def test_a_request_goes_on_after_the_output_that_it_brings() -> None:
    drive = Drive(make_limits())
    request = make_request(range(9), 12, output=oracle(range(9), 5))
    drive.add(request)
    drive.finish()
    assert request.output == oracle(range(9), 12)
    assert drive.told[request.id] == 12 - 5


def test_the_last_event_of_a_request_follows_its_last_token_in_the_same_result() -> None:
    drive = Drive(make_limits(), depth=1)
    drive.add(make_request([1, 2], 1))
    drive.plan()
    drive.apply()
    assert [type(event) for event in drive.events] == [Placed, TokensMade, Finished]


def test_logprobs_travel_with_their_tokens() -> None:
    drive = Drive(make_limits(), depth=1)
    drive.add(make_request([1, 2], 1))
    drive.plan()
    drive.results[0] = replace(drive.results[0], logprobs=[-0.25])
    drive.apply()
    assert [event.logprobs for event in drive.events if isinstance(event, TokensMade)] == [[-0.25]]


def test_logprobs_stay_with_their_tokens_when_a_neighbour_has_ended_meanwhile() -> None:
    drive = Drive(make_limits(), depth=2)
    stopping = make_request([1, 2], 9, stops=oracle([1, 2], 9))
    going_on = make_request([3, 4], 9)
    drive.add(stopping, going_on)
    while drive.told[going_on.id] != 3:
        while len(drive.results) < drive.depth:
            drive.plan()
        result = drive.results[0]
        drive.results[0] = replace(result, logprobs=[-float(token) for token in result.token_ids])
        drive.apply()
    assert drive.told[stopping.id] == 1
    for event in drive.events:
        if isinstance(event, TokensMade):
            assert list(event.logprobs) == [-float(token) for token in event.token_ids]


# ---------------------------------------------------------------- plans are differences


def test_a_decode_step_over_an_unchanged_batch_says_nothing_but_decode() -> None:
    drive = Drive(make_limits(page_size=16))
    drive.add(*(make_request([n, 1, 2], 12) for n in range(4)))
    drive.finish()
    bare = [
        plan for plan in drive.plans
        if plan.decode and not (plan.released_slots or plan.admitted or plan.pages or plan.prefill)
    ]  # fmt: skip
    assert len(bare) >= 8


def test_a_long_prompt_is_computed_in_chunks_beside_the_decoding_ones() -> None:
    drive = Drive(make_limits(page_count=100, chunk_tokens=10))
    drive.add(make_request([1, 2], 30))
    drive.run(until=lambda: len(drive.plans) >= 4)
    long = make_request(range(35), 3)
    drive.add(long)
    drive.finish()
    mixed = [plan for plan in drive.plans if plan.decode and plan.prefill]
    assert [len(plan.prefill[0].token_ids) for plan in mixed] == [10, 10, 10, 5]
    assert [plan.prefill[0].last for plan in mixed] == [False, False, False, True]


def test_the_chunk_budget_is_shared_by_all_that_prefill() -> None:
    drive = Drive(make_limits(page_count=100, chunk_tokens=10), depth=1)
    drive.add(make_request(range(4), 2), make_request(range(30, 37), 2))
    plan = drive.plan()
    assert plan is not None
    assert [(chunk.start, len(chunk.token_ids), chunk.last) for chunk in plan.prefill] == [
        (0, 4, True),
        (0, 6, False),
    ]


def test_a_prompt_that_fits_whole_into_the_next_step_is_not_begun_in_the_rest_of_this_one() -> None:
    drive = Drive(make_limits(page_count=100, chunk_tokens=10), depth=2)
    drive.add(make_request(range(7), 2), make_request(range(30, 37), 2), make_request(range(50, 62), 2))
    drive.finish()
    chunks = [[(chunk.start, len(chunk.token_ids)) for chunk in plan.prefill] for plan in drive.plans]
    assert chunks[:4] == [[(0, 7)], [(0, 7), (0, 3)], [(3, 9)], []]


def test_a_plan_says_when_it_has_the_last_token_of_a_request() -> None:
    drive = Drive(make_limits(), depth=1)
    drive.add(make_request([1, 2], 2), make_request([5, 6], 4), make_request([8, 9], 1))
    drive.finish()
    assert [plan.ends_request for plan in drive.plans if plan.decode or plan.prefill] == [
        True,
        True,
        False,
        True,
    ]


@DEPTHS
def test_without_mixed_chunks_a_step_prefills_or_decodes_but_never_both(depth: int) -> None:
    limits = make_limits(page_count=100, chunk_tokens=8, enable_mixed_chunk=False)
    drive = Drive(limits, depth=depth)
    drive.add(*(make_request(range(n, n + 20), 9) for n in range(0, 60, 20)))
    drive.finish()
    assert any(plan.decode for plan in drive.plans)
    assert not any(plan.decode and plan.prefill for plan in drive.plans)


def test_an_idle_batcher_plans_nothing_and_numbers_have_no_gap() -> None:
    drive = Drive(make_limits())
    assert drive.plan() is None
    drive.add(make_request([1], 3))
    drive.finish()
    assert drive.plan() is None
    drive.add(make_request([2], 3))
    drive.finish()
    assert [plan.step_seq for plan in drive.plans] == list(range(1, len(drive.plans) + 1))


def test_a_slot_is_released_at_once_when_there_is_nothing_else_to_do() -> None:
    drive = Drive(make_limits(), depth=1)
    request = make_request([1, 2, 3], 8)
    drive.add(request)
    drive.run(until=lambda: len(request.output) == 2)
    drive.take(drive.batcher.cancel(request))
    plan = drive.plan()
    assert plan is not None
    assert plan.released_slots == (0,)
    assert not plan.decode


def test_more_requests_than_slots_wait_and_take_the_slots_as_they_come_free() -> None:
    drive = Drive(make_limits(page_count=200, max_running_requests=2))
    drive.add(*(make_request([n], 3) for n in range(7)))
    assert (drive.batcher.running, drive.batcher.waiting) == (0, 7)
    drive.plan()
    assert (drive.batcher.running, drive.batcher.waiting) == (2, 5)
    drive.finish()
    assert {admission.slot for plan in drive.plans for admission in plan.admitted} == {0, 1}


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 31, 32, 33])
def test_a_prompt_seen_before_computes_at_least_its_last_token(length: int) -> None:
    drive = Drive(make_limits(page_size=4))
    first, second = make_request(range(length), 2), make_request(range(length), 2)
    drive.add(first)
    drive.finish()
    drive.add(second)
    drive.finish()
    (placed,) = drive.placed(second)
    assert placed.cached_tokens == (length - 1) // 4 * 4
    assert second.output == first.output


def test_the_next_turn_of_a_conversation_finds_the_answer_of_the_last_one() -> None:
    drive = Drive(make_limits(page_size=4))
    first = make_request(range(10), 12)
    drive.add(first)
    drive.finish()
    second = make_request([*first.prompt, *first.output, 5, 6], 2)
    drive.add(second)
    drive.finish()
    # Of the 22 tokens the last was never computed: 21 are in pages, 20 in full ones.
    assert drive.placed(second)[0].cached_tokens == 20


def test_nothing_of_a_prompt_is_cached_before_a_result_confirmed_it() -> None:
    drive = Drive(make_limits(page_size=4, chunk_tokens=8), depth=2)
    drive.add(make_request(range(16), 2))
    drive.plan()
    drive.plan()
    assert drive.batcher.pages.cached == 0
    drive.apply()
    assert drive.batcher.pages.cached == 2


def test_requests_with_one_new_prefix_compute_it_once() -> None:
    drive = Drive(make_limits(page_count=400, chunk_tokens=64))
    prefix = [7 * n % 61 for n in range(128)]
    requests = [make_request([*prefix, n, n + 1], 4) for n in range(8)]
    drive.add(*requests)
    drive.finish()
    assert drive.executor.computed_tokens == 128 + 8 * 2


def test_a_short_common_beginning_is_not_worth_waiting_for() -> None:
    drive = Drive(make_limits(page_count=400), depth=1)
    drive.add(*(make_request([1, 2, 3, 4, 5, n], 4) for n in range(6)))
    plan = drive.plan()
    assert plan is not None
    assert len(plan.admitted) == 6


def test_whoever_waits_for_a_neighbours_prefix_goes_on_when_the_neighbour_is_cancelled() -> None:
    drive = Drive(make_limits(page_count=400, chunk_tokens=8))
    first, second = make_request(range(60), 4), make_request(range(60), 4)
    drive.add(first, second)
    drive.plan()
    assert not drive.placed(second)
    drive.take(drive.batcher.cancel(first))
    drive.finish()
    assert second.output == oracle(range(60), 4)


def test_without_the_radix_cache_nothing_is_reused_and_nothing_is_kept() -> None:
    drive = Drive(make_limits(enable_radix_cache=False))
    for _ in range(2):
        drive.add(make_request(range(20), 2))
        drive.finish()
    assert drive.executor.computed_tokens == 40
    assert drive.batcher.pages.cached == 0


def test_prefixes_shorter_than_the_least_are_not_kept() -> None:
    drive = Drive(make_limits(page_size=4, min_cached_tokens=12))
    drive.add(make_request(range(10), 1), make_request(range(20, 33), 1))
    drive.finish()
    assert drive.batcher.matched_tokens(make_request(range(10))) == 0
    assert drive.batcher.matched_tokens(make_request(range(20, 33))) == 12


def test_a_salt_hides_a_prefix_from_other_tenants() -> None:
    drive = Drive(make_limits())
    drive.add(make_request(range(20), 1, salt="a"))
    drive.finish()
    assert drive.batcher.matched_tokens(make_request(range(20), salt="a")) == 16
    assert drive.batcher.matched_tokens(make_request(range(20), salt="b")) == 0
    assert drive.batcher.matched_tokens(make_request(range(20))) == 0


def test_an_adapter_has_prefixes_of_its_own_also_beside_a_salt_of_its_name() -> None:
    drive = Drive(make_limits())
    drive.add(make_request(range(20), 1, adapter="a", salt="b"))
    drive.finish()
    spaces = [("b", "a"), ("a", "b"), ("", "a"), ("b", ""), ("ab", ""), ("", "")]
    matched = [
        drive.batcher.matched_tokens(make_request(range(20), salt=salt, adapter=adapter))
        for salt, adapter in spaces
    ]
    assert matched == [16, 0, 0, 0, 0, 0]


def test_flushing_frees_the_cache_but_for_what_running_requests_use() -> None:
    drive = Drive(make_limits(page_size=4), depth=1)
    drive.add(make_request(range(40, 60), 1))
    drive.finish()
    request = make_request(range(16), 9)
    drive.add(request)
    drive.run(until=lambda: len(request.output) == 2)
    assert drive.batcher.flush_cache() == 5
    assert drive.batcher.pages.cached == 4
    drive.finish()
    assert drive.batcher.flush_cache() == drive.batcher.pages.free - (64 - 6)
    assert drive.batcher.pages.free == 64


# ---------------------------------------------------------------- too few pages


def tight(*, page_count: int, page_size: int = 4) -> ReplicaLimits:
    return make_limits(page_count=page_count, page_size=page_size, max_running_requests=4)


@DEPTHS
def test_when_pages_run_out_the_cache_goes_first(depth: int) -> None:
    drive = Drive(tight(page_count=12), depth=depth)
    for start in range(0, 100, 20):
        drive.add(make_request(range(start, start + 20), 6))
        drive.finish()
    assert drive.batcher.retracted_count == 0
    assert drive.batcher.pages.cached > 0


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 4])
def test_when_the_cache_is_gone_requests_are_retracted_and_still_get_every_token(
    depth: int, page_size: int
) -> None:
    drive = Drive(tight(page_count=48 // page_size, page_size=page_size), depth=depth, conservativeness=0)
    requests = [make_request(range(20 * n, 20 * n + 8), 30) for n in range(4)]
    drive.add(*requests)
    drive.finish()
    assert drive.batcher.retracted_count > 0
    assert all(request.output == oracle(request.prompt, 30) for request in requests)


def test_the_one_with_the_shortest_output_is_retracted_and_comes_back_before_those_that_wait() -> None:
    drive = Drive(tight(page_count=9), depth=1, conservativeness=0)
    old, young = make_request(range(8), 24), make_request(range(20, 28), 24)
    drive.add(old)
    drive.run(until=lambda: len(old.output) == 4)
    drive.add(young)
    drive.run(until=lambda: drive.batcher.retracted_count == 1)
    late = make_request(range(40, 44), 1)
    drive.add(late)
    drive.finish()
    assert len(drive.placed(old)) == 1
    assert len(drive.placed(young)) == 2
    again = drive.events.index(drive.placed(young)[1])
    assert again < drive.events.index(drive.placed(late)[0])
    assert drive.placed(young)[1].cached_tokens > 0  # What it had computed was kept.


@DEPTHS
def test_no_more_are_retracted_than_needed_since_pages_on_their_way_back_count(depth: int) -> None:
    drive = Drive(tight(page_count=9), depth=depth, conservativeness=0)
    drive.add(*(make_request(range(20 * n, 20 * n + 8), 12) for n in range(3)))
    drive.run(until=lambda: drive.batcher.retracted_count > 0)
    assert drive.batcher.retracted_count == 1


def test_a_request_with_a_higher_priority_is_not_retracted_for_a_lower_one() -> None:
    drive = Drive(tight(page_count=9), conservativeness=0)
    high = make_request(range(20, 28), 24, priority=1)
    low = make_request(range(8), 24)
    drive.add(low)
    drive.run(until=lambda: len(low.output) >= 4)
    drive.add(high)
    drive.finish()
    assert drive.batcher.retracted_count > 0
    assert len(drive.placed(high)) == 1


def test_the_reserve_for_future_output_makes_retraction_rare() -> None:
    careful, careless = (
        Drive(tight(page_count=12), conservativeness=conservativeness) for conservativeness in (1.0, 0.0)
    )
    for drive in (careful, careless):
        drive.add(*(make_request(range(20 * n, 20 * n + 8), 30) for n in range(4)))
        drive.finish()
    assert careful.batcher.retracted_count < careless.batcher.retracted_count


def test_a_large_request_at_the_head_is_not_overtaken_for_ever() -> None:
    drive = Drive(tight(page_count=16))
    drive.add(make_request(range(8), 20))
    drive.plan()
    large = make_request(range(20, 68), 4)
    small = [make_request([n, n, n], 4) for n in range(3)]
    drive.add(large, *small)
    drive.finish()
    first_small = min(drive.events.index(drive.placed(request)[0]) for request in small)
    assert drive.events.index(drive.placed(large)[0]) < first_small


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    drive = Drive(make_limits(page_count=4, page_size=4))
    with pytest.raises(RequestTooLarge, match="has 16 tokens; the replica has room for 16") as caught:
        drive.add(make_request(range(16), 1))
    assert (caught.value.tokens, caught.value.room_tokens) == (16, 16)
    drive.add(make_request(range(15), 1))
    drive.finish()


@DEPTHS
def test_a_request_ends_with_length_where_the_room_of_the_replica_ends(depth: int) -> None:
    drive = Drive(make_limits(page_count=4, page_size=4), depth=depth)
    by_pages = make_request(range(10), 1000)
    drive.add(by_pages)
    drive.finish()
    assert (drive.reason(by_pages), by_pages.length) == ("length", 16)
    drive = Drive(make_limits(context_tokens=13), depth=depth)
    by_context = make_request(range(10), 1000)
    drive.add(by_context)
    drive.finish()
    assert (drive.reason(by_context), by_context.length) == ("length", 13)


@DEPTHS
def test_a_request_alone_fits_into_all_pages_though_a_copy_of_its_prefix_is_cached(depth: int) -> None:
    drive = Drive(make_limits(page_count=6, page_size=2, max_running_requests=1, chunk_tokens=1), depth=depth)
    twins = [make_request([0, 7], 10), make_request([0, 7], 10)]
    drive.add(*twins)
    drive.finish()
    assert [len(request.output) for request in twins] == [10, 10]


# ---------------------------------------------------------------- leaving early


@DEPTHS
@pytest.mark.parametrize("after", range(8))
def test_a_cancelled_request_gives_everything_back_within_two_steps(depth: int, after: int) -> None:
    drive = Drive(make_limits(page_size=2, chunk_tokens=5), depth=depth)
    request = make_request(range(17), 40)
    drive.add(request)
    for _ in range(after):
        if len(drive.results) == depth:
            drive.apply()
        drive.plan()
    assert drive.batcher.cancel(request) == [Finished(request, FinishReason.CANCELLED)]
    assert drive.batcher.cancel(request) == []
    assert drive.batcher.running == 0
    steps = len(drive.plans)
    drive.run()
    assert len(drive.plans) - steps <= 2
    assert drive.batcher.pages.held == 0
    assert not drive.executor.slots


def test_pages_of_a_cancelled_request_are_held_while_a_step_in_flight_writes_them() -> None:
    drive = Drive(make_limits(), depth=2)
    request = make_request(range(20), 9)
    drive.add(request)
    drive.plan()
    drive.batcher.cancel(request)
    assert drive.batcher.pages.held == 6
    drive.apply()
    assert drive.batcher.pages.held == 0


def test_a_failed_slot_ends_its_request_alone_and_nothing_of_it_is_cached() -> None:
    drive = Drive(make_limits(enable_radix_cache=True), depth=2)
    bad, good = make_request(range(3), 30), make_request(range(10, 13), 30)
    drive.add(bad, good)
    drive.run(until=lambda: len(bad.output) == 9)
    slot = next(a.slot for plan in drive.plans for a in plan.admitted if a.request is bad)
    drive.executor.fail_next.add(slot)
    drive.finish()
    assert drive.reason(bad) == "NON_FINITE_LOGITS"
    assert good.output == oracle(good.prompt, 30)
    assert drive.batcher.matched_tokens(make_request([*bad.prompt, *bad.output])) == 0


def test_a_lost_replica_hands_back_its_requests_with_their_tokens_and_counts_a_death_of_those_that_ran() -> (
    None
):
    drive = Drive(make_limits(page_count=200, max_running_requests=2))
    requests = [make_request([n, n], 9) for n in range(4)]
    drive.add(*requests)
    drive.run(until=lambda: len(requests[0].output) == 3)
    assert drive.batcher.lose() == requests
    assert [request.deaths for request in requests] == [1, 1, 0, 0]
    assert (drive.batcher.running, drive.batcher.waiting, drive.batcher.pages.held) == (0, 0, 0)
    again = Drive(make_limits(page_count=200))
    again.add(*requests)
    again.finish()
    assert all(request.output == oracle(request.prompt, 9) for request in requests)


# ---------------------------------------------------------------- results that must not be


def test_a_result_out_of_order_is_refused_and_changes_nothing() -> None:
    drive = Drive(make_limits(), depth=2)
    drive.add(make_request([1, 2], 9))
    drive.plan()
    drive.plan()
    first, second = drive.results
    with pytest.raises(StepOutOfOrder, match="of step 2 came, but that of step 1 is next"):
        drive.batcher.apply(second)
    drive.apply()
    with pytest.raises(StepOutOfOrder, match="of step 1 came, but that of step 2 is next"):
        drive.batcher.apply(first)
    drive.finish()
    with pytest.raises(StepOutOfOrder, match="no step is in flight"):
        drive.batcher.apply(first)


@pytest.mark.parametrize(
    ("slots", "tokens"),
    [([0], [5]), ([0, 1, 2], [5, 6, 7]), ([0, 0], [5, 6]), ([0, 1], [5]), ([], [])],
    ids=["one missing", "one too many", "one twice", "a token short", "none"],
)
def test_a_result_whose_slots_are_not_those_planned_is_refused(slots: list[int], tokens: list[int]) -> None:
    drive = Drive(make_limits(), depth=1)
    drive.add(make_request([1, 2], 3), make_request([3, 4], 3))
    drive.plan()
    with pytest.raises(ResultContradictsPlan):
        drive.batcher.apply(StepResult(1, [Slot(slot) for slot in slots], tokens))
    drive.finish()


def test_slots_in_another_order_are_understood() -> None:
    drive = Drive(make_limits(), depth=1)
    requests = [make_request([1, 2], 3), make_request([3, 4], 3)]
    drive.add(*requests)
    drive.plan()
    result = drive.results[0]
    drive.results[0] = StepResult(1, list(reversed(result.slots)), list(reversed(result.token_ids)))
    drive.finish()
    assert [request.output for request in requests] == [oracle([1, 2], 3), oracle([3, 4], 3)]


def test_a_lost_page_is_found_by_the_check() -> None:
    drive = Drive(make_limits())
    drive.batcher._pool.ledger.allocate(1)
    with pytest.raises(IdentityViolated, match="free \\+ cached \\+ held is not total"):
        drive.batcher.check_identity()


@pytest.mark.parametrize(
    "request_", [make_request([], 4), make_request([1], 2, output=[5, 6])], ids=["empty", "nothing to make"]
)
def test_a_request_that_makes_no_sense_is_refused(request_: object) -> None:
    with pytest.raises(ValueError, match="prompt tokens and"):
        Drive(make_limits()).add(request_)  # type: ignore[arg-type]


def test_a_request_cannot_be_added_twice() -> None:
    drive, request = Drive(make_limits()), make_request([1])
    drive.add(request)
    with pytest.raises(ValueError, match="is here already"):
        drive.add(request)
