"""What `chipmesh up` was asked for, as one frozen object that also travels to a detached launcher."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshkit.config import FrozenConfig, LogLevel


class MeshOptions(FrozenConfig):
    """The flags of `up`. None leaves the choice to the service, which takes it from what the chip reports.

    chunked_prefill_size: tokens; -1 turns chunking off. mem_fraction_static: share in (0, 1].
    page_size, max_total_tokens, context_length: tokens. port, http_port: 0 picks a free one.
    start_timeout_s: seconds until everything must be ready.
    """

    model_path: str
    backend: str = "cpu"
    backend_options: dict[str, str] = Field(default_factory=dict)
    device_groups: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = ""
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    page_size: int | None = None
    schedule_policy: str | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    served_model_name: str | None = None
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    enable_mixed_chunk: bool | None = None
    host: str = "127.0.0.1"
    port: int = 0
    http_port: int = 0
    otlp_endpoint: str | None = None
    strict: bool = False
    executor_python: str | None = None
    log_level: LogLevel = "info"
    start_timeout_s: float = 600.0
    cache_dir: Path
