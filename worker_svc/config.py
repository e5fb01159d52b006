"""Configuration of one worker: which model on which chip, and how its executor is kept running."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from meshkit.address import parse_listen
from meshkit.config import FrozenConfig, ServiceConfig
from meshkit.errors import MeshError


class ExecutorConfig(FrozenConfig):
    """How the executor's process runs."""

    python: str | None = None
    """Its interpreter. Not set: the supervisor's own."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads, as OMP_NUM_THREADS. Not set: an equal share of the processors where
    `executors_on_host` says that there are others, else the libraries' own choice.
    """
    environment: dict[str, str] = Field(default_factory=dict)
    """Set before it starts, over the supervisor's: visibility variables, another interpreter's PYTHONPATH.
    `GOMP_SPINCOUNT` is 5,000 unless given here.
    """
    listen: str = "127.0.0.1:0"
    """Where it serves; the scheduler must reach it."""
    advertise: str | None = None
    """What the scheduler is told where that differs: "HOST" (the bound port is added) or "HOST:PORT"."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Until the plugin is loaded."""
    stop_timeout_s: float = Field(default=5.0, gt=0)
    """From SIGTERM to SIGKILL."""
    restart_backoff_s: float = Field(default=0.5, gt=0)
    """Pause before a start, doubled after each that failed."""
    restart_backoff_max_s: float = Field(default=10.0, gt=0)
    """The longest pause."""
    max_restarts: int = Field(default=5, ge=0)
    """Failed starts in a row; one more ends the worker."""
    probe_interval_s: float = Field(default=1.0, gt=0)
    """Between two probes."""
    unresponsive_after_s: float = Field(default=30.0, gt=0)
    """Without an answer to a probe for so long it is replaced."""
    hung_after_s: float = Field(default=120.0, gt=0)
    """At a single step for so long it is replaced."""

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            parse_listen(value, field="executor.listen")
        except MeshError as error:
            raise ValueError(error.message) from error
        return value


class WorkerConfig(ServiceConfig):
    """One worker."""

    worker_id: str = Field(min_length=1)
    """Stable and unique in the mesh."""
    group: str = Field(default="default", min_length=1)
    """Which it joins."""
    model: str = Field(min_length=1)
    """Name that requests use."""
    scheduler_address: str = Field(min_length=1)
    """Where it registers: "HOST:PORT" or "unix:PATH"."""
    backend: str = Field(default="cpu", min_length=1)
    """Name of the plugin."""
    backend_options: dict[str, str] = Field(default_factory=dict)
    """Texts, for the plugin."""
    device: int = Field(default=0, ge=0)
    """Index as the framework counts, after visibility variables."""
    model_path: str = ""
    """Folder, .gguf, or name of a pulled model."""
    load_format: str = "auto"
    """auto, safetensors, gguf or dummy (random weights)."""
    dtype: str = "auto"
    """auto: the first of the chip's."""
    kv_cache_dtype: str = "auto"
    """auto: the first of the chip's."""
    quantization: str = ""
    """w8a8 or w4a16: weights are rounded as they are loaded. a8: what they are multiplied with, where a step
    program does so, else refused.
    """
    strict: bool = False
    """Refuse reference operators."""
    page_size: int | None = Field(default=None, ge=1)
    """Tokens. Not set: the chip's first, else 16."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Not set: the chip's preference, else 64."""
    mem_fraction_static: float | None = Field(default=None, gt=0, le=1)
    """Weights and KV cache as a share of the memory. Not set: 0.85, or 0.25 where it is the host's."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV cache in tokens; goes before the share."""
    chunked_prefill_size: int | None = Field(default=None, ge=1)
    """Prompt tokens of a step. Not set: the chip's preference."""
    cache_dir: Path | None = None
    """Models and what is made of them once. Not set: `CHIPMESH_CACHE_DIR`, `XDG_CACHE_HOME`/chipmesh,
    ~/.cache/chipmesh.
    """
    executor: ExecutorConfig = ExecutorConfig()
    """Its process."""
    executors_on_host: int = Field(default=1, ge=1)
    """How many share the host's memory and processors."""
    takeover_token: SecretStr | None = None
    """Lets a new supervisor take over this id while it is live. Not set: one of this process, which is in its
    log.
    """
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM."""
