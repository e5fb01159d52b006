"""The fleet to simulate, as a JSON file describes it: groups of replicas of modelled chips."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from meshkit.config import FrozenConfig
from scheduler_svc.core.structures import ReplicaLimits


class ChipModel(FrozenConfig):
    """How fast a chip is and what it holds. One step takes

        step_ms + prefill tokens / prefill_tokens_per_s
                + (decode_ms + decode_ms_per_request * b + decode_us_per_context_token * c if b rows decode)

    with c the tokens that the b rows attend to. Measure the four numbers with `chipmesh bench`.
    """

    prefill_tokens_per_s: PositiveFloat
    decode_ms: float = Field(ge=0.0)
    decode_ms_per_request: float = Field(default=0.0, ge=0.0)
    decode_us_per_context_token: float = Field(default=0.0, ge=0.0)
    step_ms: float = Field(default=0.0, ge=0.0)
    kv_tokens: PositiveInt
    page_size: PositiveInt = 16
    max_running_requests: PositiveInt = 64
    chunk_tokens: PositiveInt = 2048
    context_tokens: PositiveInt = 131_072

    def step_s(self, *, prefill_tokens: int, decoding: int, context_tokens: int) -> float:
        """Seconds of one step; one that only takes slots away runs nothing on the chip."""
        if not prefill_tokens and not decoding:
            return 0.0
        seconds = self.step_ms / 1e3 + prefill_tokens / self.prefill_tokens_per_s
        if decoding:
            seconds += (self.decode_ms + self.decode_ms_per_request * decoding) / 1e3
            seconds += self.decode_us_per_context_token * context_tokens / 1e6
        return seconds

    def limits(self) -> ReplicaLimits:
        """What the core is told of such a replica."""
        return ReplicaLimits(
            page_count=max(self.kv_tokens // self.page_size, 2),
            page_size=self.page_size,
            max_running_requests=self.max_running_requests,
            chunk_tokens=self.chunk_tokens,
            context_tokens=self.context_tokens,
        )


class FleetGroup(FrozenConfig):
    """Replicas of one kind of chip, with a weight among all groups."""

    name: str = Field(min_length=1)
    replicas: PositiveInt
    weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    chip: ChipModel


class Fleet(FrozenConfig):
    """All groups; they serve one model. schedule_policy: of every replica."""

    groups: tuple[FleetGroup, ...] = Field(min_length=1)
    schedule_policy: str = "fcfs"
