"""What a generation will do, with every parameter as it counts: plain frozen data, no protobuf."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    """Where and when it runs among others; see SchedulingOptions of the inference contract."""

    priority: int = 0
    cache_salt: str = ""
    session_key: str = ""


@dataclass(frozen=True)
class GenerationSpec:
    """One request, checked and completed.

    end_token_ids: all ids that end it, the model's (unless ignored) and the client's.
    """

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    stop: StopConditions
    end_token_ids: tuple[int, ...]
    logprobs: bool = False
    scheduling: Scheduling = Scheduling()


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
