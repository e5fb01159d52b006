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
    """Bounds beyond which a group loses its traffic by itself; see core.guard.Bounds. Times in seconds."""

    max_error_share: float | None = Field(default=None, ge=0.0, le=1.0)
    max_ttft_s: PositiveFloat | None = None
    max_token_gap_s: PositiveFloat | None = None
    min_agreement: float | None = Field(default=None, ge=0.0, le=1.0)
    min_requests: PositiveInt = 20
    window: PositiveInt = 200

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
    """A replica of another numeric class than those that serve answers `prompts` (token ids) greedily before
    it takes traffic. max_logprob_gap: largest difference of a token's log-probability. output_tokens: of each
    answer. timeout_s: for each answer, in seconds.
    """

    prompts: tuple[tuple[NonNegativeInt, ...], ...] = Field(min_length=1)
    max_logprob_gap: float = Field(default=0.05, ge=0.0)
    output_tokens: PositiveInt = 16
    timeout_s: PositiveFloat = 60.0


class GroupConfig(FrozenConfig):
    """A set of replicas that serve one model with a weight.

    chunked_prefill_size (tokens) and max_running_requests are ceilings: a replica that reports less gets
    less. guard: bounds of a canary. parity: what a replica of another numeric class has to pass.
    """

    name: str = Field(min_length=1)
    model: str = Field(min_length=1)
    weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    chunked_prefill_size: PositiveInt | None = None
    max_running_requests: PositiveInt | None = None
    schedule_policy: str | None = None
    guard: GuardConfig | None = None
    parity: ParityConfig | None = None

    @field_validator("schedule_policy")
    @classmethod
    def _policy_is_known(cls, name: str | None) -> str | None:
        if name is not None:
            make_policy(name)
        return name


class SchedulerConfig(ServiceConfig):
    """Everything that the scheduler can be told. Times are in seconds.

    strict_groups: a worker may join only a group named here; otherwise its group is made with weight 1.
    step_deadline_floor_s, step_deadline_factor: a step may take max(floor, factor × predicted time).
    step_window_s: decode steps that take so long together travel in one message, since a message costs what
    several steps of a small model do; 0: each alone; None: what the chip of each replica prefers. A new
    request waits for two such messages at most.
    attach_timeout_s: bound of each of the two calls that attach to an executor.
    reattach_backoff_s, reattach_backoff_max_s: pause between attempts to attach, doubled after each failure.
    drain_timeout_s: how long running requests may go on in DrainWorker, where that says nothing itself.
    drain_grace_s: how long this service serves on after SIGTERM, while there are requests; longer than
    gateways do, so that a mesh which stops as a whole ends what it can.
    schedule_conservativeness: factor on the share of future output that admission keeps free.
    radix_attention_min_len: tokens; shorter prefixes are not kept. enable_priority_preemption: a waiting
    request may push out a running one whose priority is lower by priority_preemption_threshold.
    identity_check_delay_s: idle time of a replica after which its page identity is checked.
    traffic_file: weights of groups by model, `{"MODEL": {"GROUP": WEIGHT}}`, looked at every
    traffic_file_interval_s seconds; what it says goes over the configured weights.
    forget_lost_after_s: how long a lost worker is still shown.
    """

    groups: tuple[GroupConfig, ...] = ()
    strict_groups: bool = False
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = Field(default=1.0, ge=0.0)
    radix_eviction_policy: str = "lru"
    radix_attention_min_len: NonNegativeInt = 0
    enable_priority_preemption: bool = False
    priority_preemption_threshold: PositiveInt = 1
    chunked_prefill_size: PositiveInt | None = None
    max_running_requests: PositiveInt | None = None
    enable_radix_cache: bool = True
    enable_mixed_chunk: bool = True
    enable_overlap: bool = True
    max_queued_requests: PositiveInt = 1024
    heartbeat_interval_s: PositiveFloat = 0.25
    lease_duration_s: PositiveFloat = 1.0
    step_deadline_floor_s: PositiveFloat = 30.0
    step_deadline_factor: float = Field(default=10.0, ge=1.0)
    step_window_s: float | None = Field(default=None, ge=0.0, le=1.0)
    attach_timeout_s: PositiveFloat = 5.0
    reattach_backoff_s: PositiveFloat = 0.05
    reattach_backoff_max_s: PositiveFloat = 2.0
    drain_timeout_s: float = Field(default=30.0, ge=0.0)
    drain_grace_s: float = Field(default=10.0, ge=0.0)
    identity_check_delay_s: float = Field(default=0.1, ge=0.0)
    forget_lost_after_s: PositiveFloat = 300.0
    traffic_file: Path | None = None
    traffic_file_interval_s: PositiveFloat = 0.5
    max_message_bytes: PositiveInt = 64 * 1024 * 1024

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
