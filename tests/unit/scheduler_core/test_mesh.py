from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from scheduler_svc.core.errors import (
    CannotConstrain,
    QueueFull,
    RequestTooLarge,
    UnknownModel,
    UnknownPolicy,
    UnknownReplica,
)
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.core.structures import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Placed,
    ReplicaId,
    ReplicaLimits,
    Request,
    TokensMade,
)
from tests.unit.scheduler_core.simulated_executor import (
    SimulatedExecutor,
    make_limits,
    make_request,
    oracle,
)

A, B, C = ReplicaId("a/1"), ReplicaId("b/1"), ReplicaId("c/1")


class Mesh:
    """A MeshCore with an executor for each replica."""

    def __init__(self, core: MeshCore | None = None) -> None:
        self.core = core or MeshCore()
        self.executors: dict[ReplicaId, SimulatedExecutor] = {}
        self.events: list[Event] = []

    def group(self, name: str, *replicas: ReplicaId, weight: float = 1.0) -> Mesh:
        self.core.configure_group(name, model="m", weight=weight)
        for replica in replicas:
            self.join(replica, name)
        return self

    def join(
        self, replica: ReplicaId, group: str, limits: ReplicaLimits | None = None, *, on_trial: bool = False
    ) -> None:
        limits = limits or make_limits(page_count=100)
        self.executors[replica] = SimulatedExecutor(limits)
        self.events += self.core.add_replica(replica, group=group, limits=limits, on_trial=on_trial)

    def leave(self, replica: ReplicaId, *, blame: bool = True) -> None:
        del self.executors[replica]
        self.events += self.core.remove_replica(replica, blame=blame)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.core.submit(request)

    def step(self, *, deadly: Request | None = None) -> bool:
        """One step of every replica; whether there was any. deadly: its next token kills who makes it."""
        worked = False
        for replica, executor in list(self.executors.items()):
            batcher = self.core.batcher(replica)
            plan = batcher.plan()
            self.events += batcher.take_events()
            if plan is not None:
                worked = True
                result = executor.execute(plan)
                if deadly in [executor.slots[slot].admission.request for slot in result.slots]:
                    self.leave(replica)
                    return True
                self.events += batcher.apply(result)
        return worked

    def run(self) -> None:
        for _ in range(2000):
            if not self.step():
                return
        raise AssertionError("not done")

    def where(self, request: Request) -> list[ReplicaId]:
        return [
            event.replica for event in self.events if isinstance(event, Placed) and event.request is request
        ]

    def queued(self) -> dict[ReplicaId, int]:
        return {replica: self.core.batcher(replica).waiting for replica in self.executors}

    def end(self, request: Request) -> Event:
        (end,) = (
            event for event in self.events
            if not isinstance(event, (Placed, TokensMade)) and event.request is request
        )  # fmt: skip
        return end


def test_traffic_is_split_over_groups_by_weight() -> None:
    mesh = Mesh().group("big", A, weight=80).group("small", B, weight=20)
    mesh.submit(*(make_request([n]) for n in range(50)))
    assert mesh.queued() == {A: 40, B: 10}


def test_requests_of_a_session_stay_in_their_group_and_new_ones_follow_the_weights() -> None:
    mesh = Mesh().group("one", A).group("two", B)
    for number in range(12):
        mesh.submit(replace(make_request([number]), session=f"s{number % 3}"))
    assert mesh.queued() in ({A: 8, B: 4}, {A: 4, B: 8})
    mesh.core.set_weights("m", {"two": 1.0})
    mesh.submit(replace(make_request([99]), session="s0"))
    assert sum(mesh.queued().values()) == 13


def test_a_request_that_lost_its_replica_stays_in_its_group_and_is_counted_once() -> None:
    mesh = Mesh().group("big", A, C, weight=80).group("small", B, weight=20)
    mesh.submit(*(make_request([n]) for n in range(10)))
    assert mesh.queued()[B] == 2
    mesh.leave(C, blame=False)
    assert mesh.queued() == {A: 8, B: 2}
    mesh.submit(*(make_request([50 + n]) for n in range(10)))
    assert mesh.queued() == {A: 16, B: 4}


def test_a_replica_on_trial_takes_what_is_pinned_to_it_and_nothing_else() -> None:
    mesh = Mesh().group("one", A)
    mesh.join(B, "one", on_trial=True)
    mesh.submit(*(make_request([n]) for n in range(4)))
    assert mesh.queued() == {A: 4, B: 0}
    mesh.submit(replace(make_request([9]), group="one", is_pinned=True, pinned_replica=B))
    assert mesh.queued() == {A: 4, B: 1}
    mesh.core.admit_replica(B)
    mesh.submit(*(make_request([20 + n]) for n in range(3)))
    assert mesh.queued()[B] == 4


def test_a_pinned_request_goes_to_its_group_whatever_the_weight() -> None:
    mesh = Mesh().group("one", A).group("shadow", B, weight=0)
    mesh.submit(replace(make_request([1]), group="shadow", is_pinned=True))
    assert mesh.queued() == {A: 0, B: 1}


def test_a_group_may_have_a_policy_of_its_own() -> None:
    mesh = Mesh()
    mesh.core.configure_group("own", model="m", weight=1.0, policy="lof")
    mesh.join(A, "own", make_limits(max_running_requests=1))
    short, long = make_request([1], 2), make_request([2], 9)
    mesh.submit(short, long)
    mesh.run()
    ends = [event.request for event in mesh.events if isinstance(event, Finished)]
    assert ends == [long, short]
    with pytest.raises(UnknownPolicy):
        mesh.core.configure_group("own", model="m", weight=1.0, policy="nonsense")


def test_weights_can_be_changed_while_running_and_groups_left_out_get_nothing() -> None:
    mesh = Mesh().group("one", A).group("two", B)
    mesh.core.set_weights("m", {"two": 3.0})
    mesh.submit(*(make_request([n]) for n in range(10)))
    assert mesh.queued() == {A: 0, B: 10}
    assert [group.weight for group in mesh.core.snapshot().groups] == [0.0, 3.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"three": 1.0}, "has no group three; its groups are: one, two"),
        ({"one": -1.0}, "weight of group 'one' is -1.0"),
        ({"one": float("nan")}, "weight of group 'one' is nan"),
        ({"one": 0.0}, "would be 0"),
        ({}, "would be 0"),
    ],
)
def test_wrong_weights_are_refused_and_change_nothing(weights: dict[str, float], message: str) -> None:
    mesh = Mesh().group("one", A).group("two", B)
    with pytest.raises(ValueError, match=message):
        mesh.core.set_weights("m", weights)
    assert [group.weight for group in mesh.core.snapshot().groups] == [1.0, 1.0]


def test_inside_a_group_a_cached_prefix_draws_a_request_and_load_the_others() -> None:
    mesh = Mesh().group("g", A, B)
    first = make_request(range(40), 2)
    mesh.submit(first)
    mesh.run()
    (home,) = mesh.where(first)
    other = B if home == A else A
    mesh.submit(make_request(range(60, 64)))
    mesh.submit(make_request(range(70, 74)))
    assert mesh.queued() == {A: 1, B: 1}
    same = make_request([*range(40), 1], 2)
    mesh.submit(same)
    assert mesh.queued()[home] == 2
    assert mesh.queued()[other] == 1


def test_a_group_of_another_model_gets_nothing() -> None:
    mesh = Mesh().group("g", A)
    mesh.core.configure_group("h", model="other", weight=1)
    mesh.join(B, "h")
    mesh.submit(*(make_request([n]) for n in range(6)))
    assert mesh.queued() == {A: 6, B: 0}


def test_an_unknown_model_is_refused_with_those_served() -> None:
    mesh = Mesh().group("g", A)
    request = make_request([1])
    request.model = "gpt"
    with pytest.raises(UnknownModel, match="'gpt' is not served; served are: m"):
        mesh.submit(request)


def test_requests_wait_for_the_first_replica_and_go_there_in_order_of_priority_and_age() -> None:
    mesh = Mesh().group("g")
    requests = [make_request([1], 2), make_request([2], 2, priority=1), make_request([3], 2)]
    mesh.submit(*requests)
    assert mesh.core.snapshot().waiting == 3
    mesh.join(A, "g", make_limits(max_running_requests=1))
    assert mesh.core.snapshot().waiting == 0
    mesh.run()
    order = [event.request for event in mesh.events if isinstance(event, Placed)]
    assert order == [requests[1], requests[0], requests[2]]


def test_beyond_the_limit_of_the_queue_requests_are_refused() -> None:
    mesh = Mesh(MeshCore(max_queued_requests=3)).group("g")
    mesh.submit(*(make_request([n]) for n in range(3)))
    with pytest.raises(QueueFull, match="3 requests wait already"):
        mesh.submit(make_request([9]))
    mesh.join(A, "g")
    with pytest.raises(QueueFull):
        mesh.submit(make_request([9]))  # They wait still, if elsewhere.
    mesh.step()
    mesh.submit(make_request([9]))


def test_requests_of_a_lost_replica_go_on_elsewhere_with_no_token_lost_or_repeated() -> None:
    mesh = Mesh().group("g", A, B)
    requests = [make_request([n, n + 1], 12) for n in range(6)]
    mesh.submit(*requests)
    for _ in range(5):
        mesh.step()
    mesh.leave(A)
    mesh.run()
    moved = [request for request in requests if mesh.where(request) == [A, B]]
    assert len(moved) == 3
    for request in requests:
        assert request.output == oracle(request.prompt, 12)
        told = [token for event in mesh.events if isinstance(event, TokensMade)
                for told, token in zip(event.requests, event.token_ids, strict=True)
                if told is request]  # fmt: skip
        assert told == request.output


def test_a_request_under_which_two_replicas_died_is_not_tried_again() -> None:
    mesh = Mesh().group("g", A, B)
    poison = make_request([1], 50)
    mesh.submit(poison)
    for _ in range(2):
        mesh.step(deadly=poison)
    assert not mesh.executors
    failed = mesh.end(poison)
    assert isinstance(failed, Failed)
    assert failed.reason == "POISONED"
    assert "it was running on 2 replicas" in failed.message
    assert mesh.core.snapshot().waiting == 0


@given(
    good=st.integers(0, 40),
    replicas=st.integers(1, 3),
    deadly_tokens=st.sampled_from([0, 1, 7]),
    slots=st.sampled_from([4, 16, 64]),
)
def test_a_request_that_kills_what_runs_it_takes_two_replicas_and_no_other_request_with_it(
    good: int, replicas: int, deadly_tokens: int, slots: int
) -> None:
    """It kills the replica in whose step its token number `deadly_tokens` is made, each time again."""
    mesh = Mesh().group("g")
    numbers = itertools.count()

    def join() -> None:
        mesh.join(
            ReplicaId(f"r{next(numbers)}"), "g", make_limits(page_count=400, max_running_requests=slots)
        )

    for _ in range(replicas):
        join()
    poison = make_request([63, 1, 2], 20)
    requests = [make_request([number, 1, 2], 20) for number in range(good)]
    mesh.submit(*requests[: good // 2], poison, *requests[good // 2 :])
    lost = 0
    while mesh.step(deadly=poison if len(poison.output) == deadly_tokens else None):
        lost += len(mesh.executors) < replicas
        if len(mesh.executors) < replicas:
            join()
    assert lost == 2
    assert isinstance(mesh.end(poison), Failed)
    for request in requests:
        assert isinstance(mesh.end(request), Finished)
        assert request.output == oracle(request.prompt, 20)


def test_a_request_that_made_headway_after_a_death_may_live_through_many_more() -> None:
    mesh = Mesh().group("g", A)
    request = make_request([1], 50)
    mesh.submit(request)
    for replica in (B, C, A, B):
        for _ in range(6):
            mesh.step()
        mesh.leave(next(iter(mesh.executors)))
        mesh.join(replica, "g")
    mesh.run()
    assert request.output == oracle([1], 50)
    assert request.deaths_in_all == 4


def test_a_replica_that_leaves_in_order_is_no_death_of_its_requests() -> None:
    mesh = Mesh().group("g", A)
    request = make_request([1], 50)
    mesh.submit(request)
    for replica in (B, C, A):
        mesh.step()
        mesh.leave(next(iter(mesh.executors)), blame=False)
        mesh.join(replica, "g")
    mesh.run()
    assert request.deaths == 0
    assert request.output == oracle([1], 50)


def test_a_draining_replica_ends_what_it_has_and_gets_nothing_new() -> None:
    mesh = Mesh().group("g", A, B)
    first = make_request([1], 9)
    mesh.submit(first)
    mesh.step()
    (home,) = mesh.where(first)
    mesh.core.drain_replica(home)
    later = [make_request([n], 2) for n in range(2, 8)]
    mesh.submit(*later)
    mesh.run()
    assert isinstance(mesh.end(first), Finished)
    assert Counter(replica for request in later for replica in mesh.where(request)) == {
        (B if home == A else A): 6
    }


def test_with_all_replicas_draining_requests_wait() -> None:
    mesh = Mesh().group("g", A)
    mesh.core.drain_replica(A)
    mesh.submit(make_request([1]))
    assert mesh.core.snapshot().waiting == 1


def test_a_large_request_goes_to_the_replica_that_can_hold_it() -> None:
    mesh = Mesh().group("small").group("large", weight=0.01)
    mesh.join(A, "small", make_limits(page_count=4))
    mesh.join(B, "large", make_limits(page_count=40))
    request = make_request(range(50), 2)
    mesh.submit(request)
    mesh.run()
    assert mesh.where(request) == [B]
    with pytest.raises(RequestTooLarge, match="has 200 tokens; the replica has room for 160"):
        mesh.submit(make_request(range(200), 2))


def constrained_request() -> Request:
    request = make_request([1, 2, 3], 2)
    request.is_constrained = True
    return request


def test_a_constrained_request_goes_to_the_replicas_that_can_follow_its_form() -> None:
    mesh = Mesh().group("without", weight=100).group("with", weight=0.01)
    mesh.join(A, "without", replace(make_limits(), takes_constraints=False))
    mesh.join(B, "with")
    request = constrained_request()
    mesh.submit(request)
    mesh.run()
    assert mesh.where(request) == [B]


def test_a_constrained_request_that_no_replica_can_follow_is_told_so() -> None:
    mesh = Mesh().group("g")
    waiting = constrained_request()
    mesh.submit(waiting)
    mesh.join(A, "g", replace(make_limits(), takes_constraints=False))
    failed = mesh.end(waiting)
    assert isinstance(failed, Failed)
    assert failed.reason == "CONSTRAINT_UNSUPPORTED"
    with pytest.raises(CannotConstrain, match="form"):
        mesh.submit(constrained_request())


def test_a_request_that_waited_for_a_replica_too_small_for_it_is_told_so() -> None:
    mesh = Mesh().group("g")
    request = make_request(range(50), 2)
    mesh.submit(request)
    mesh.join(A, "g", make_limits(page_count=4))
    failed = mesh.end(request)
    assert isinstance(failed, Failed)
    assert failed.reason == "REQUEST_TOO_LARGE"
    assert mesh.core.snapshot().waiting == 0


def test_a_cancelled_request_is_found_wherever_it_is_and_only_once() -> None:
    mesh = Mesh().group("g")
    unplaced, queued, running = (make_request([n], 9) for n in range(3))
    mesh.submit(unplaced)
    assert mesh.core.cancel(unplaced) == [Finished(unplaced, FinishReason.CANCELLED)]
    mesh.join(A, "g", make_limits(max_running_requests=1))
    mesh.submit(running, queued)
    mesh.step()
    for request in (queued, running):
        assert mesh.core.cancel(request) == [Finished(request, FinishReason.CANCELLED)]
        assert mesh.core.cancel(request) == []
    mesh.run()
    assert mesh.core.batcher(A).pages.held == 0


def test_requests_waiting_on_a_group_without_weight_go_there_once_it_has_some() -> None:
    mesh = Mesh().group("g", A, weight=0)
    request = make_request([1], 2)
    mesh.submit(request)
    assert mesh.core.snapshot().waiting == 1
    mesh.core.set_weights("m", {"g": 1})
    mesh.run()
    assert mesh.where(request) == [A]


def test_the_snapshot_tells_of_every_group_and_replica() -> None:
    mesh = Mesh().group("g", A, weight=2)
    mesh.submit(make_request(range(10), 9))
    mesh.step()
    (group,) = mesh.core.snapshot().groups
    (replica,) = group.replicas
    assert (group.name, group.model, group.weight) == ("g", "m", 2)
    assert (replica.replica, replica.running, replica.waiting, replica.draining) == (A, 1, 0, False)
    assert replica.pages.free + replica.pages.cached + replica.pages.held == replica.pages.total == 100


def test_what_is_not_in_the_mesh_is_named() -> None:
    mesh = Mesh().group("g", A)
    for call in (mesh.core.batcher, mesh.core.drain_replica, mesh.core.remove_replica):
        with pytest.raises(UnknownReplica, match="replica 'b/1' is not in the mesh"):
            call(B)
    with pytest.raises(ValueError, match="group 'h' is not configured; there is: g"):
        mesh.join(B, "h")
    with pytest.raises(ValueError, match="'a/1' is in the mesh already"):
        mesh.join(A, "g")
    with pytest.raises(ValueError, match="group 'g' serves 'm', not 'other'"):
        mesh.core.configure_group("g", model="other", weight=1)
    with pytest.raises(UnknownPolicy):
        MeshCore(policy="lifo")
