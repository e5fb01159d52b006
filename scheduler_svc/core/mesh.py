"""The mesh: groups with weights, their replicas, and the requests that no replica can take yet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.affinity import Affinity
from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.errors import CannotConstrain, RequestTooLarge, UnknownModel, UnknownReplica
from scheduler_svc.core.placement import ALLOWED_IMBALANCE, Candidate, WeightedTurns, choose_replica
from scheduler_svc.core.policy import make_policy
from scheduler_svc.core.queue_bounds import QueueBounds, QueueTally
from scheduler_svc.core.sessions import Sessions
from scheduler_svc.core.structures import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PageCounts,
    ReplicaId,
    ReplicaLimits,
    Request,
    RequestId,
)
from scheduler_svc.core.token_key import token_key

_MOST_CANDIDATES = 16
"""Replicas whose cache is looked into for one request; more would cost more than their prefix saves."""
MAX_DEATHS = 2
"""Replicas that may die under a request, without a token made in between, before it is quarantined."""
MAX_DEATHS_IN_ALL = 8
"""The same, whatever it made: one that kills now and then would go on for ever."""


@dataclass(slots=True)
class _Replica:
    batcher: Batcher
    draining: bool = False
    on_trial: bool = False
    """Takes requests that are pinned to it, and no others."""


@dataclass(slots=True)
class _Group:
    name: str
    model: str
    weight: float
    policy: str = ""
    """Of replicas that join; "": the mesh's."""
    replicas: dict[ReplicaId, _Replica] = field(default_factory=dict)
    ready: list[Batcher] = field(default_factory=list)
    """Batchers of replicas that do not drain."""
    common_room: int = 0
    """Tokens that every ready replica has room for."""
    affinity: Affinity = field(default_factory=Affinity)

    def refresh(self) -> None:
        """Replicas came, went, drain or passed their trial."""
        self.ready = [
            each.batcher for each in self.replicas.values() if not each.draining and not each.on_trial
        ]
        self.common_room = min((each.room_tokens for each in self.ready), default=0)

    def takers(self, request: Request) -> list[Batcher]:
        """Batchers that can take a request."""
        if request.length < self.common_room and not request.is_constrained:
            return self.ready
        return [batcher for batcher in self.ready if batcher.fits(request)]

    def place(self, request: Request, takers: list[Batcher]) -> Batcher:
        """Choose one of `takers` and add the request to its queue."""
        if len(takers) == 1:
            takers[0].add(request)
            return takers[0]
        key = token_key(request.prompt) + token_key(request.output)
        batcher = self._best(request, takers, key)
        batcher.add(request)
        self.affinity.remember(key, salt=request.salt, replica=batcher.replica)
        return batcher

    def _best(self, request: Request, takers: list[Batcher], key: bytes) -> Batcher:
        """By cached prefix and load: the idlest against those that had the prefix and are hardly busier."""
        loads = [batcher.load for batcher in takers]
        idlest = takers[loads.index(min(loads))]
        bound = idlest.load + ALLOWED_IMBALANCE
        near: list[Batcher] = []
        for replica in self.affinity.candidates(key, salt=request.salt):
            known = self.replicas[replica]
            if (
                not known.draining
                and not known.on_trial
                and known.batcher.load <= bound
                and known.batcher.fits(request)
            ):
                near.append(known.batcher)
                if len(near) == _MOST_CANDIDATES:
                    break
        near.append(idlest)
        matches = [Candidate(each.matched_tokens(request, key=key), each.load) for each in near]
        return near[choose_replica(matches)]


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A replica now. `running` and `waiting`: requests; `retracted_count`: so far."""

    replica: ReplicaId
    draining: bool
    running: int
    waiting: int
    retracted_count: int
    pages: PageCounts


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """A group now."""

    name: str
    model: str
    weight: float
    replicas: tuple[ReplicaSnapshot, ...]


@dataclass(frozen=True, slots=True)
class MeshSnapshot:
    """The mesh now. `waiting`: requests that no replica could take yet."""

    waiting: int
    groups: tuple[GroupSnapshot, ...]


class MeshCore:
    """Places requests on replicas; what happens there is the Batchers' business.

    policy: name of a schedule policy, for every replica. max_queued_requests, max_queued_tokens: requests
    without a slot, and their tokens, over all queues, before new ones are refused (queue_bounds.py).
    conservativeness: of every Batcher.
    """

    def __init__(
        self,
        *,
        policy: str = "fcfs",
        max_queued_requests: int = 1024,
        max_queued_tokens: int = 4 * 1024 * 1024,
        conservativeness: float = 1.0,
    ) -> None:
        make_policy(policy)  # An unknown name is refused here, not when the first replica comes.
        self._policy = policy
        self._bounds = QueueBounds(max_requests=max_queued_requests, max_tokens=max_queued_tokens)
        self._conservativeness = conservativeness
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[ReplicaId, _Group] = {}
        self._turns: dict[str, WeightedTurns] = {}
        self._unplaced: dict[RequestId, Request] = {}
        self._unplaced_tally = QueueTally()
        self._sessions = Sessions()

    def __repr__(self) -> str:
        return f"<MeshCore {len(self._groups)} groups, {len(self._group_of)} replicas, {self.waiting} wait>"

    @property
    def waiting(self) -> int:
        """Requests that no replica could take yet."""
        return len(self._unplaced)

    # ------------------------------------------------------------ groups and replicas

    def configure_group(self, name: str, *, model: str, weight: float, policy: str | None = None) -> None:
        """Make a group, or change its weight. policy: None for the mesh's, or the one that it has.

        Raises:
            ValueError: the weight is negative or not finite, or the group serves another model.
            UnknownPolicy: lists those known.
        """
        _check_weight(name, weight)
        group = self._groups.setdefault(name, _Group(name, model, weight))
        if group.model != model:
            raise ValueError(f"group {name!r} serves {group.model!r}, not {model!r}")
        if policy is not None:
            self.set_policy(name, policy)
        group.weight = weight
        self._turns.setdefault(model, WeightedTurns()).reset()

    def set_policy(self, name: str, policy: str) -> None:
        """Another order of admission in a group that is configured, for those that wait too.

        Raises:
            UnknownPolicy: lists those known. Nothing was changed.
        """
        make_policy(policy)
        group = self._groups[name]
        group.policy = policy
        for each in group.replicas.values():
            each.batcher.set_policy(make_policy(policy))

    def set_weights(self, model: str, weights: Mapping[str, float]) -> list[Event]:
        """Set the weights of all groups of a model; those left out get 0.

        Returns the events of requests that could be placed only now.

        Raises:
            ValueError: a group that the model does not have, a weight that is negative or not finite, or none
                above 0. Nothing was changed.
        """
        self.check_weights(model, weights)
        for group in self._groups.values():
            if group.model == model:
                group.weight = weights.get(group.name, 0.0)
        self._turns[model].reset()
        return self._place_waiting()

    def check_weights(self, model: str, weights: Mapping[str, float]) -> None:
        """Raises ValueError where `set_weights` would."""
        groups = sorted(group.name for group in self._groups.values() if group.model == model)
        unknown = sorted(set(weights) - set(groups))
        if unknown:
            known = ", ".join(groups) or "none"
            raise ValueError(f"model {model!r} has no group {', '.join(unknown)}; its groups are: {known}")
        for name, weight in weights.items():
            _check_weight(name, weight)
        if not any(weights.values()):
            raise ValueError(f"all weights of model {model!r} would be 0; give one group more")

    def add_replica(
        self, replica: ReplicaId, *, group: str, limits: ReplicaLimits, on_trial: bool = False
    ) -> list[Event]:
        """A replica takes requests from now on; those that wait unplaced go there first.

        on_trial: until `admit_replica` it takes those only that are pinned to it.

        Raises:
            ValueError: the group is not configured, or the replica is in the mesh already.
        """
        if group not in self._groups:
            known = ", ".join(self._groups) or "none"
            raise ValueError(f"group {group!r} is not configured; there is: {known}")
        if replica in self._group_of:
            raise ValueError(f"replica {replica!r} is in the mesh already")
        batcher = Batcher(
            limits=limits,
            policy=make_policy(self._groups[group].policy or self._policy),
            replica=replica,
            conservativeness=self._conservativeness,
        )
        self._groups[group].replicas[replica] = _Replica(batcher, on_trial=on_trial)
        self._groups[group].refresh()
        self._group_of[replica] = self._groups[group]
        return self._place_waiting()

    def remove_replica(self, replica: ReplicaId, *, blame: bool = True) -> list[Event]:
        """A replica is gone: its requests go on elsewhere, or wait; Failed(POISONED) after too many deaths.

        blame: those that were running count this as a death; not so where it went in order.

        Raises:
            UnknownReplica: it is not in the mesh.
        """
        lost = self._replica(replica).batcher.lose(blame=blame)
        group = self._group_of.pop(replica)
        del group.replicas[replica]
        group.affinity.forget(replica)
        group.refresh()
        events: list[Event] = []
        for request in lost:
            if request.deaths >= MAX_DEATHS or request.deaths_in_all >= MAX_DEATHS_IN_ALL:
                events.append(_poisoned(request))
            else:
                self._hold(request)
        return events + self._place_waiting()

    def admit_replica(self, replica: ReplicaId) -> list[Event]:
        """A replica has passed its trial. Without effect where it was on none.

        Raises:
            UnknownReplica: it is not in the mesh.
        """
        self._replica(replica).on_trial = False
        self._group_of[replica].refresh()
        return self._place_waiting()

    def drain_replica(self, replica: ReplicaId) -> None:
        """Nothing new goes to a replica; what it has goes on.

        Raises:
            UnknownReplica: it is not in the mesh.
        """
        self._replica(replica).draining = True
        self._group_of[replica].refresh()

    def batcher(self, replica: ReplicaId) -> Batcher:
        """The batcher of a replica.

        Raises:
            UnknownReplica: it is not in the mesh.
        """
        return self._replica(replica).batcher

    def _replica(self, replica: ReplicaId) -> _Replica:
        group = self._group_of.get(replica)
        if group is None:
            raise UnknownReplica(replica)
        return group.replicas[replica]

    def _batchers(self) -> Iterable[Batcher]:
        return (known.batcher for group in self._groups.values() for known in group.replicas.values())

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> ReplicaId | None:
        """Take a request: into the queue of a replica, which is returned, or to wait for one that is ready.

        Raises:
            UnknownModel: no group serves its model.
            QueueFull: as much waits as may.
            RequestTooLarge: there are ready replicas, and it fits none of them.
        """
        models = {group.model for group in self._groups.values()}
        if request.model not in models:
            raise UnknownModel(request.model, models)
        self._bounds.check(self._queues(), owner=request.owner, tokens=request.length)
        placed = self._place(request)
        if placed is None:
            self._hold(request)
        return placed

    def _queues(self) -> list[QueueTally]:
        """What waits, queue by queue; those that no replica could take yet are one more."""
        return [self._unplaced_tally, *(batcher.queue for batcher in self._batchers())]

    def _hold(self, request: Request) -> None:
        """It waits for a replica that can take it."""
        self._unplaced[request.id] = request
        self._unplaced_tally.add(request.owner, request.length)

    def _let_go(self, request: Request) -> bool:
        """It waits for none any more; whether it did."""
        held = self._unplaced.pop(request.id, None) is not None
        if held:
            self._unplaced_tally.remove(request.owner, request.length)
        return held

    def cancel(self, request: Request) -> list[Event]:
        """End a request, wherever it is. Idempotent: without effect once it has had its last event."""
        if self._let_go(request):
            return [Finished(request, FinishReason.CANCELLED)]
        for batcher in self._batchers():
            events = batcher.cancel(request)
            if events:
                return events
        return []

    def _place(self, request: Request) -> ReplicaId | None:
        """Put a request into the queue of a replica; None where none is ready.

        Raises:
            RequestTooLarge: there are ready replicas, and it fits none of them.
        """
        if request.pinned_replica is not None:
            batcher = self._replica(request.pinned_replica).batcher
            batcher.add(request)
            return batcher.replica
        takers = {group.name: able for group in self._serving(request) if (able := group.takers(request))}
        chosen: str | None = request.group or self._sessions.group_of(request)
        if chosen not in takers:
            weights = {name: self._groups[name].weight for name in takers}
            chosen = self._turns[request.model].choose(weights)
        if chosen is None:
            self._check_size(request)
            return None
        request.group = chosen
        self._sessions.remember(request)
        return self._groups[chosen].place(request, takers[chosen]).replica

    def _serving(self, request: Request) -> list[_Group]:
        """Groups that a request may go to."""
        if request.is_pinned:
            return [group for group in self._groups.values() if group.name == request.group]
        return [each for each in self._groups.values() if each.model == request.model and each.weight > 0]

    def _check_size(self, request: Request) -> None:
        """A request that no ready replica of its model can hold, or whose form none can follow, is told so,
        rather than left to wait.
        """
        ready = [batcher for group in self._serving(request) for batcher in group.ready]
        able = [each for each in ready if each.limits.takes_constraints or not request.is_constrained]
        if ready and not able:
            raise CannotConstrain(request.model)
        if able:
            rooms = [batcher.room_tokens for batcher in able]
            raise RequestTooLarge(tokens=request.length, room_tokens=max(rooms))

    def _place_waiting(self) -> list[Event]:
        """Try all that wait, higher priorities and older ones first."""
        events: list[Event] = []
        waiting = sorted(self._unplaced.values(), key=lambda request: (-request.priority, request.id))
        for request in waiting:
            try:
                is_placed = self._place(request) is not None
            except RequestTooLarge as error:
                events.append(Failed(request, "REQUEST_TOO_LARGE", str(error)))
                is_placed = True
            except CannotConstrain as error:
                events.append(Failed(request, "CONSTRAINT_UNSUPPORTED", str(error)))
                is_placed = True
            if is_placed:
                self._let_go(request)
        return events

    # ------------------------------------------------------------ seeing it

    def snapshot(self) -> MeshSnapshot:
        """The whole mesh now."""
        groups = tuple(
            GroupSnapshot(
                group.name,
                group.model,
                group.weight,
                tuple(_snapshot(replica, known) for replica, known in group.replicas.items()),
            )
            for group in self._groups.values()
        )
        return MeshSnapshot(waiting=self.waiting, groups=groups)


def _snapshot(replica: ReplicaId, known: _Replica) -> ReplicaSnapshot:
    batcher = known.batcher
    return ReplicaSnapshot(
        replica=replica,
        draining=known.draining,
        running=batcher.running,
        waiting=batcher.waiting,
        retracted_count=batcher.retracted_count,
        pages=batcher.pages,
    )


def _poisoned(request: Request) -> Failed:
    return Failed(
        request,
        "POISONED",
        f"it was running on {request.deaths_in_all} replicas as they died, and is not tried again",
    )


def _check_weight(name: str, weight: float) -> None:
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight of group {name!r} is {weight}; it must be at least 0")
