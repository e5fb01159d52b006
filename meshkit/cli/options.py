"""What `chipmesh up` was asked for, as one frozen object that also travels to a detached launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from meshkit.config import FrozenConfig, LogLevel


class GroupOptions(FrozenConfig):
    """One group of a groups file. What it leaves out is as the flags say.

    devices: members as `--device-groups` has them, for one group: "cpu:0+cpu:1,cpu:2". weight: among the
    groups of its model. guard, parity: as the scheduler's groups have them (docs/operating.md).
    chunked_prefill_size and max_running_requests are ceilings over what each replica reports. step_window_s:
    seconds, in place of what each chip prefers.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    devices: str
    weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    model_path: str | None = None
    served_model_name: str | None = None
    backend_options: dict[str, str] | None = None
    dtype: str | None = None
    load_format: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    page_size: int | None = None
    schedule_policy: str | None = None
    step_window_s: float | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    strict: bool | None = None
    executor_python: str | None = None
    guard: dict[str, Any] | None = None
    parity: dict[str, Any] | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """Flags of MeshOptions that this group sets for itself."""
        own = self.model_dump(exclude_none=True, exclude={"name", "devices", "weight"})
        return {name: value for name, value in own.items() if name in MeshOptions.model_fields}


class MeshOptions(FrozenConfig):
    """The flags of `up`. None leaves the choice to the service, which takes it from what the chip reports.

    chunked_prefill_size: tokens; -1 turns chunking off. mem_fraction_static: share in (0, 1].
    page_size, max_total_tokens, context_length: tokens. port, http_port, openai_port: 0 picks a free one.
    groups: from a groups file, instead of device_groups. model_path may be empty where every group has one.
    tensor_parallel_size, pipeline_parallel_size: their product is the number of each replica's chips; None:
    by the chips and the model. start_timeout_s: seconds until everything must be ready.
    """

    model_path: str
    backend: str = "cpu"
    backend_options: dict[str, str] = Field(default_factory=dict)
    device_groups: str | None = None
    groups: tuple[GroupOptions, ...] = ()
    dtype: str = "auto"
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = ""
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    page_size: int | None = None
    schedule_policy: str | None = None
    step_window_s: float | None = None
    schedule_conservativeness: float | None = None
    radix_eviction_policy: str | None = None
    radix_attention_min_len: int | None = None
    enable_priority_preemption: bool = False
    traffic_file: Path | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    served_model_name: str | None = None
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    enable_mixed_chunk: bool | None = None
    host: str = "127.0.0.1"
    port: int = 0
    http_port: int = 0
    openai_port: int = 0
    api_keys_file: Path | None = None
    allow_anonymous: bool = False
    otlp_endpoint: str | None = None
    page_traces: bool = True
    strict: bool = False
    executor_python: str | None = None
    log_level: LogLevel = "info"
    start_timeout_s: float = 600.0
    cache_dir: Path
