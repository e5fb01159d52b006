"""The scheduler's configuration: groups, ceilings, leases and deadlines."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from meshkit.config import FrozenConfig, ServiceConfig
from scheduler_svc.core.eviction import make_eviction_policy
from scheduler_svc.core.guard import Bounds
from scheduler_svc.core.policy import make_policy

DEFAULT_CHUNK_TOKENS = 2048
"""Prompt tokens of a step where neither worker, group nor scheduler says."""


class GuardConfig(FrozenConfig):
    """Bounds beyond which a group loses its traffic by itself; see core.guard.Bounds."""

    max_error_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """Of requests that fail."""
    max_ttft_s: PositiveFloat | None = None
    """Seconds to the first token, of which a tenth may be more."""
    max_token_gap_s: PositiveFloat | None = None
    """Seconds between two tokens, of which a tenth may be more."""
    min_agreement: float | None = Field(default=None, ge=0.0, le=1.0)
    """Of a shadow's tokens with those served."""
    min_requests: PositiveInt = 20
    """Fewer prove nothing."""
    window: PositiveInt = 200
    """Newest requests that are looked at."""

    @model_validator(mode="after")
    def _window_holds_enough(self) -> GuardConfig:
        if self.window < self.min_requests:
            raise ValueError(
                f"window is {self.window}; it must hold at least min_requests ({self.min_requests})"
            )
        return self

    def bounds(self) -> Bounds:
        """As the core has them."""
        return Bounds(**self.model_dump())


class ParityConfig(FrozenConfig):
    """What a replica of another numeric class than those that serve has to answer before it takes traffic."""

    prompts: tuple[tuple[NonNegativeInt, ...], ...] = Field(min_length=1)
    """Token ids; answered greedily."""
    max_logprob_gap: float = Field(default=0.05, ge=0.0)
    """Largest difference of a token's log-probability."""
    output_tokens: PositiveInt = 16
    """Of each answer."""
    timeout_s: PositiveFloat = 60.0
    """For each answer."""


class GroupConfig(FrozenConfig):
    """A set of replicas that serve one model with a weight."""

    name: str = Field(min_length=1)
    """Unique in the mesh."""
    model: str = Field(min_length=1)
    """Name that requests use."""
    weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Its share of the model's requests is this over the sum of its groups'."""
    chunked_prefill_size: PositiveInt | None = None
    """Ceiling, tokens: a replica that reports less gets less."""
    max_running_requests: PositiveInt | None = None
    """Ceiling per replica."""
    schedule_policy: str | None = None
    """Its own, in place of the scheduler's."""
    step_window_s: float | None = Field(default=None, ge=0.0, le=1.0)
    """Its own, in place of the scheduler's."""
    guard: GuardConfig | None = None
    """Bounds of a canary."""
    parity: ParityConfig | None = None
    """What a replica of another numeric class has to pass. Not set: nothing."""

    @field_validator("schedule_policy")
    @classmethod
    def _policy_is_known(cls, name: str | None) -> str | None:
        if name is not None:
            make_policy(name)
        return name


class SchedulerConfig(ServiceConfig):
    """Everything that the scheduler can be told."""

    groups: tuple[GroupConfig, ...] = ()
    """Those that are known from the start."""
    strict_groups: bool = False
    """Refuse workers of groups that are not listed; otherwise such a group is made with weight 1."""
    schedule_policy: str = "fcfs"
    """fcfs, lpm, dfs-weight, lof, hrrn, shortest-prefill-first or random. Priorities go before any."""
    schedule_conservativeness: float = Field(default=1.0, ge=0.0)
    """Factor on the room that admission keeps free for the output of running requests."""
    radix_eviction_policy: str = "lru"
    """lru, lfu, slru or priority."""
    radix_attention_min_len: NonNegativeInt = 0
    """Tokens; shorter prefixes are not kept."""
    enable_priority_preemption: bool = False
    """A waiting request may push out a running one of lower priority."""
    priority_preemption_threshold: PositiveInt = 1
    """Lower by so much."""
    chunked_prefill_size: PositiveInt | None = None
    """Ceiling, prompt tokens of a step; 2048 where nobody says."""
    max_running_requests: PositiveInt | None = None
    """Ceiling per replica."""
    enable_radix_cache: bool = True
    """Keep prefixes."""
    enable_mixed_chunk: bool = True
    """Prompt chunks and decodes in one step."""
    enable_overlap: bool = True
    """Two messages of steps in flight."""
    max_queued_requests: PositiveInt = 1024
    """Without a slot, in all queues together. At the bound, owners whose part is less than an even share
    still get in, up to twice; others are refused, RESOURCE_EXHAUSTED with a retry hint.
    """
    max_queued_tokens: PositiveInt = 4 * 1024 * 1024
    """The same of their prompts and outputs."""
    heartbeat_interval_s: PositiveFloat = 0.25
    """Told to workers."""
    lease_duration_s: PositiveFloat = 1.0
    """A worker that is silent for so long is lost; at least twice the interval."""
    step_deadline_floor_s: PositiveFloat = 30.0
    """A step may take max(floor, factor × predicted time)."""
    step_deadline_factor: float = Field(default=10.0, ge=1.0)
    """See `step_deadline_floor_s`."""
    step_window_s: float | None = Field(default=None, ge=0.0, le=1.0)
    """Decode steps that take so long together travel in one message, since a message costs what several steps
    of a small model do; 0: each alone. Not set: what the chip prefers. A new request waits for two such
    messages at most.
    """
    attach_timeout_s: PositiveFloat = 5.0
    """Of each of the two calls that attach to an executor."""
    reattach_backoff_s: PositiveFloat = 0.05
    """Pause between attempts to attach, doubled after each failure."""
    reattach_backoff_max_s: PositiveFloat = 2.0
    """The longest pause."""
    drain_timeout_s: float = Field(default=30.0, ge=0.0)
    """How long running requests may go on in DrainWorker, where that says nothing itself."""
    drain_grace_s: float = Field(default=10.0, ge=0.0)
    """How long it serves on after SIGTERM, while there are requests; longer than gateways do, so that a mesh
    which stops as a whole ends what it can.
    """
    identity_check_delay_s: float = Field(default=0.1, ge=0.0)
    """Idle time of a replica after which its pages are added up."""
    forget_lost_after_s: PositiveFloat = 300.0
    """How long a lost worker is still shown."""
    traffic_file: Path | None = None
    """Weights of groups by model, `{"MODEL": {"GROUP": WEIGHT}}`, over the configured ones; followed as it
    changes.
    """
    traffic_file_interval_s: PositiveFloat = 0.5
    """Between two looks at it."""
    max_message_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest message."""

    @field_validator("groups")
    @classmethod
    def _names_are_unique(cls, groups: tuple[GroupConfig, ...]) -> tuple[GroupConfig, ...]:
        names = [group.name for group in groups]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"group names must be unique; given twice: {', '.join(twice)}")
        return groups

    @field_validator("schedule_policy")
    @classmethod
    def _policy_is_known(cls, name: str) -> str:
        make_policy(name)
        return name

    @field_validator("radix_eviction_policy")
    @classmethod
    def _eviction_is_known(cls, name: str) -> str:
        make_eviction_policy(name)
        return name

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> SchedulerConfig:
        if self.lease_duration_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"lease_duration_s is {self.lease_duration_s}; it must be at least twice "
                f"heartbeat_interval_s ({self.heartbeat_interval_s}), or one late heartbeat ends a lease"
            )
        return self

    @property
    def depth(self) -> int:
        """Messages of step plans in flight at most."""
        return 2 if self.enable_overlap else 1

    def group(self, name: str) -> GroupConfig | None:
        """The group configured under `name`, or None."""
        return next((group for group in self.groups if group.name == name), None)
