"""The core's plain data: requests, limits, step plans and results, and the events that leave the core.

Nothing here is changed once it is made, but a Request. What is made for every token or admission is not
frozen all the same: that would double what it costs to make.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

from scheduler_svc.core.token_key import Namespace

RequestId = NewType("RequestId", int)
"""Number of a request in one scheduler, never used twice."""

ReplicaId = NewType("ReplicaId", str)
"""A replica's worker id and instance id, joined; a new executor is a new replica."""

Slot = NewType("Slot", int)


class FinishReason(enum.Enum):
    """Why a request ended well."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Request:
    """A request with all that replay needs: continuing it anywhere is a prefill of `prompt` and `output`.

    `payload` belongs to the shell (sampling parameters, trace context) and travels through the core unread.
    """

    id: RequestId
    model: str
    prompt: Sequence[int]
    max_output_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    priority: int = 0
    salt: str = ""
    needs_history: bool = False
    """The sampler needs the tokens themselves (penalties), not only their number."""
    is_constrained: bool = False
    """Its output has a given form; not every replica can follow one."""
    deaths: int = 0
    """Replicas that were lost while it ran on them, since it last made headway."""
    deaths_in_all: int = 0
    """Those, and those before."""
    blamed_for: ReplicaId | None = None
    """The last of those."""
    suspect_until: int = -1
    """Output tokens that it must pass to be no suspect of the last death any more."""
    payload: Any = None
    adapter: str = ""
    """Name of the adapter (LoRA) that it runs with; "" for none. Adapters do not share prefixes."""

    owner: str = ""
    """Whose it is; owners of equal priority share a replica fairly (fair_share.py)."""
    session: str = ""
    """Requests of one session go to one group while that can take them."""
    group: str = ""
    """The group that took it. A request goes on there while it can, so that weights count it once."""
    is_pinned: bool = False
    """Runs in `group` or not at all, whatever the weights are: a copy of a request, or a trial."""
    pinned_replica: ReplicaId | None = None
    """Runs on this replica or not at all, also while the replica is on trial."""

    @property
    def space(self) -> Namespace:
        """Where its prefix may be looked for."""
        return Namespace(self.salt, self.adapter)

    @property
    def is_suspect(self) -> bool:
        """Whether it may be the one that its last replica died of (suspects.py)."""
        return len(self.output) <= self.suspect_until

    def blame(self, replica: ReplicaId, *, steps_in_flight: int) -> None:
        """A replica was lost while it ran there: what it did in steps in flight may have been the cause."""
        self.blamed_for = replica
        self.deaths += 1
        self.deaths_in_all += 1
        self.suspect_until = len(self.output) + steps_in_flight

    def clear(self) -> None:
        """It made headway, or that replica is alive: the last death was not its doing."""
        self.deaths = 0
        self.suspect_until = -1

    @property
    def length(self) -> int:
        """Tokens that a replica must hold to make the next one: prompt and output so far."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What one replica can hold and do, after the group's ceilings were applied to its report."""

    page_count: int
    page_size: int
    """Tokens of a page."""
    max_running_requests: int
    chunk_tokens: int
    """Most prompt tokens of a step."""
    context_tokens: int
    """Longest sequence, prompt and output together."""
    enable_radix_cache: bool = True
    enable_mixed_chunk: bool = True
    min_cached_tokens: int = 0
    """Prefixes shorter than this are not kept (`radix-attention-min-len`)."""
    eviction_policy: str = "lru"
    """Which cached prefix goes first: lru, lfu, slru or priority (`radix-eviction-policy`)."""
    priority_preemption: bool = False
    """Whether a waiting request may retract running ones of lower priority when it finds no room."""
    preemption_threshold: int = 1
    """By how much the priority must be higher for that; at least 1."""
    enable_kv_events: bool = False
    """Whether changes of the prefix cache are recorded for readers (kv_events.py)."""
    takes_constraints: bool = True
    """Whether the outputs of its requests may have a given form."""


@dataclass(slots=True)
class Admission:
    """A request enters a slot. Mirrors AdmittedRequest of the step protocol."""

    slot: Slot
    request: Request
    output_count: int
    cached_tokens: int
    page_ids: Sequence[int]


@dataclass(slots=True)
class PageAppend:
    """Pages appended to a slot's page table."""

    slot: Slot
    page_ids: Sequence[int]


@dataclass(slots=True)
class PrefillChunk:
    """A run of known tokens of one slot; `last` samples one."""

    slot: Slot
    start: int
    token_ids: Sequence[int]
    last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as a difference to what the executor keeps. Mirrors StepPlan of the step protocol, which
    `ends_request` is no part of.
    """

    step_seq: int
    released_slots: tuple[Slot, ...] = ()
    admitted: tuple[Admission, ...] = ()
    pages: tuple[PageAppend, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: bool = False
    ends_request: bool = False
    """Some request has its last token in it, if not before."""


@dataclass(frozen=True, slots=True)
class SlotFailure:
    """A request that cannot go on, told by the executor."""

    slot: Slot
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made. `logprobs` is empty where nobody asked for them."""

    step_seq: int
    slots: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    failures: Sequence[SlotFailure] = ()


@dataclass(slots=True)
class Placed:
    """A request entered a slot of a replica, the first time or again."""

    request: Request
    replica: ReplicaId
    cached_tokens: int


@dataclass(slots=True)
class TokensMade:
    """The tokens of a step: one for each of `requests`, the last of its `output` already.

    One event for all: to make one for each token would cost more than all else that a token costs here.
    `logprobs` is empty where nobody asked for them.
    """

    requests: Sequence[Request]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(slots=True)
class Finished:
    """A request ended well. Last event of a request."""

    request: Request
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended badly. Last event of a request. `reason` is UPPER_SNAKE."""

    request: Request
    reason: str
    message: str


Event = Placed | TokensMade | Finished | Failed


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of a replica; `free + cached + held == total`."""

    total: int
    free: int
    cached: int
    held: int
