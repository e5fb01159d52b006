"""What `chipmesh bench serve` was asked for, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr

from meshkit.config import FrozenConfig, parse_config
from meshkit.errors import InvalidArgument

Backend = Literal["grpc", "openai", "openai-chat"]
Dataset = Literal["random", "shared-prefix", "multi-turn", "tree", "trace"]

PROMPTS_PER_CLIENT = 5
"""Fewer prompts than so many times the concurrency, and a run is mostly its beginning and its end."""
DEFAULT_CONCURRENCY = 8
DEFAULT_OPEN_LOOP_PROMPTS = 100


class BenchSettings(FrozenConfig):
    """One run. Lengths are in tokens.

    gateway: "HOST:PORT", for grpc. base_url: for the others. model: "" for the only one that is served.
    num_prompts: None: 5 for each of max_concurrency in a closed loop, 100 in an open one, all of a trace.
    request_rate: requests per second, perhaps infinite: an open loop. None: a trace's arrivals where it has
        them, else a closed loop of max_concurrency (8) clients.
    random_input_len: prompt; its own part after a shared prefix; a turn's; a tree's root.
    random_output_len: of each answer. thought_len: what a child of a tree adds to its parent's prompt.
    num_warmups: requests before the run, of the same kind and another seed, that are not counted.
    tokenizer: tokenizer.json, or a folder with one: prompts of token ids are sent as text.
    vocab_size: None: as the server says.
    goodput: bounds in milliseconds by ttft, tpot, e2e.
    """

    backend: Backend = "grpc"
    gateway: str | None = None
    base_url: str | None = None
    model: str = ""
    api_key: SecretStr | None = None
    authority: str | None = None
    dataset_name: Dataset = "random"
    dataset_path: Path | None = None
    num_prompts: int | None = Field(default=None, ge=1)
    request_rate: float | None = Field(default=None, gt=0)
    burstiness: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_concurrency: int | None = Field(default=None, ge=1)
    num_warmups: int = Field(default=1, ge=0)
    random_input_len: int = Field(default=100, ge=1)
    random_output_len: int = Field(default=64, ge=1)
    shared_prefix_len: int = Field(default=1024, ge=1)
    shared_prefix_groups: int = Field(default=1, ge=1)
    turns: int = Field(default=4, ge=1)
    tree_branches: int = Field(default=3, ge=1)
    tree_depth: int = Field(default=2, ge=0)
    thought_len: int = Field(default=32, ge=1)
    tokenizer: Path | None = None
    vocab_size: int | None = Field(default=None, ge=1)
    seed: int = 0
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    ignore_eos: bool = True
    extra_body: dict[str, Any] = Field(default_factory=dict)
    goodput: dict[str, float] = Field(default_factory=dict)

    @property
    def concurrency(self) -> int:
        """Of a closed loop."""
        return self.max_concurrency or DEFAULT_CONCURRENCY

    @property
    def prompts(self) -> int:
        """How many requests to make; of a trace see num_prompts."""
        if self.num_prompts is not None:
            return self.num_prompts
        if self.request_rate is not None:
            return DEFAULT_OPEN_LOOP_PROMPTS
        return PROMPTS_PER_CLIENT * self.concurrency

    def describe(self) -> dict[str, Any]:
        """For a report, as JSON holds it: no secrets, and an infinite rate as a word."""
        shown = self.model_dump(mode="json", exclude={"api_key"}, exclude_none=True)
        if self.request_rate is not None and math.isinf(self.request_rate):
            shown["request_rate"] = "inf"
        return shown


def parse_settings(raw: Mapping[str, Any], *, source: str = "chipmesh bench serve") -> BenchSettings:
    """Settings from what a command line gave, by field. source: the command.

    Raises:
        InvalidArgument: with the flag at fault, the value and what is allowed.
    """
    try:
        settings = parse_config(BenchSettings, dict(raw), source=source)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=_flag(error.field or "")) from error
    return check_settings(settings)


def check_settings(settings: BenchSettings) -> BenchSettings:
    """The same settings, if they go together.

    Raises:
        InvalidArgument: two that do not; the field is the flag to change.
    """
    ours = settings.backend == "grpc"
    wanted, others = ("gateway", "base_url") if ours else ("base_url", "gateway")
    if getattr(settings, wanted) is None:
        raise _misfit(wanted, f"is not given, and --backend {settings.backend} needs it")
    if getattr(settings, others) is not None:
        raise _misfit(others, f"does not go with --backend {settings.backend}; give {_flag(wanted)} alone")
    if ours and settings.extra_body:
        raise _misfit("extra_body", "is for OpenAI's interface; leave it out with --backend grpc")
    if (settings.dataset_name == "trace") != (settings.dataset_path is not None):
        raise _misfit("dataset_path", "is the file of --dataset-name trace; give both or neither")
    if settings.backend == "openai-chat" and settings.dataset_path is None and settings.tokenizer is None:
        raise _misfit(
            "tokenizer",
            f"is not given: openai-chat takes text, and --dataset-name {settings.dataset_name} makes token "
            "ids; name the model's tokenizer.json, or use --backend openai",
        )
    if settings.request_rate is not None and math.isnan(settings.request_rate):
        raise _misfit("request_rate", "is nan; a number above 0, or inf, is allowed")
    return settings


def _misfit(field: str, text: str) -> InvalidArgument:
    return InvalidArgument(f"{_flag(field)} {text}", field=_flag(field))


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
