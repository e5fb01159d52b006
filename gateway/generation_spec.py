"""What a generation will do, with every parameter as it counts: plain frozen data, no protobuf."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshkit.constraints.form import Constraint


class FinishReason(enum.Enum):
    """Why a generation ended well."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Sampling:
    """Effective sampling parameters. Field names and meanings are those of the protos; top_k 0 is all."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None

    @property
    def numbers(self) -> dict[str, Any]:
        """All but the constraint, whose messages differ from contract to contract."""
        return {name: value for name, value in vars(self).items() if name != "constraint"}


@dataclass(frozen=True)
class StopConditions:
    """When a generation ends. stop_token_ids: the client's own, without the model's end tokens."""

    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True)
class Scheduling:
    """Where and when it runs among others; see SchedulingOptions of the inference contract.

    resume_window_s: None for the gateway's own.
    """

    priority: int = 0
    cache_salt: str = ""
    session_key: str = ""
    resume_window_s: float | None = None


class RequestKey(NamedTuple):
    """What a request is known by: each owner has ids of its own. owner: name of its key, or ""."""

    owner: str
    request_id: str


@dataclass(frozen=True)
class GenerationSpec:
    """One request, checked and completed.

    end_token_ids: all ids that end it, the model's (unless ignored) and the client's.
    seed_is_drawn: the client left the seed to the gateway.
    owner: name of the key that it belongs to, "" without one.
    choice: index among the generations that one request asked for; draws depend on it.
    """

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    stop: StopConditions
    end_token_ids: tuple[int, ...]
    logprobs: bool = False
    scheduling: Scheduling = Scheduling()
    seed_is_drawn: bool = False
    owner: str = ""
    choice: int = 0

    @property
    def key(self) -> RequestKey:
        """What it is known by at this gateway."""
        return RequestKey(self.owner, self.request_id)

    def ending_of(self, token_ids: Sequence[int], *, matched_stop: str | None) -> FinishReason | None:
        """Why a generation with this output has ended by it; None where it goes on.

        matched_stop: the stop string that its last token completed.
        """
        count = len(token_ids)
        # A complete output of a given form ends whatever min_tokens says: nothing else may follow.
        fewest = 0 if self.sampling.constraint is not None else self.stop.min_tokens
        if matched_stop is not None:
            return FinishReason.STOP
        if count and token_ids[-1] in self.end_token_ids and count >= fewest:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.stop.max_tokens else None


@dataclass(frozen=True)
class Finish:
    """How a generation ended well. matched_stop: the stop string that was found, or empty."""

    reason: FinishReason
    matched_stop: str = ""


@dataclass(frozen=True)
class Placed:
    """Where a request runs."""

    group: str = ""
    worker: str = ""
    chip: str = ""
    numeric_class: str = ""
