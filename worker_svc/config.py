"""Configuration of one worker: which model on which chip, and how its executor is kept running."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from meshkit.address import parse_listen
from meshkit.config import FrozenConfig, ServiceConfig
from meshkit.errors import MeshError


class ExecutorConfig(FrozenConfig):
    """How the executor's process runs.

    python: its interpreter; None: the supervisor's own. environment: set before it starts, over the
    supervisor's (visibility variables, PYTHONPATH of another interpreter).
    threads: compute threads on the host, given as OMP_NUM_THREADS; None: an equal share of the processors
    where executors_on_host says that there are others, else the libraries' own choice.
    listen: where it serves; it must be reachable for the scheduler. advertise: what the scheduler is told
    where that differs: "HOST" (the bound port is added) or "HOST:PORT".
    max_restarts: failed starts in a row after which the worker gives up.
    unresponsive_after_s: an executor that answers no probe for so long is replaced.
    hung_after_s: one that has been at a single step for so long is, too.
    """

    python: str | None = None
    threads: int | None = Field(default=None, ge=1)
    environment: dict[str, str] = Field(default_factory=dict)
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    start_timeout_s: float = Field(default=120.0, gt=0)
    stop_timeout_s: float = Field(default=5.0, gt=0)
    restart_backoff_s: float = Field(default=0.5, gt=0)
    restart_backoff_max_s: float = Field(default=10.0, gt=0)
    max_restarts: int = Field(default=5, ge=0)
    probe_interval_s: float = Field(default=1.0, gt=0)
    unresponsive_after_s: float = Field(default=30.0, gt=0)
    hung_after_s: float = Field(default=120.0, gt=0)

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            parse_listen(value, field="executor.listen")
        except MeshError as error:
            raise ValueError(error.message) from error
        return value


class WorkerConfig(ServiceConfig):
    """One worker. `listen` is the supervisor's own address (health only); the scheduler talks to
    `executor.listen`.

    worker_id: stable and unique in the mesh. model: name that requests use.
    device: index as the framework counts, after visibility variables.
    max_total_tokens: size of the KV cache in tokens; else mem_fraction_static of the device's memory, see
    kv_sizing.
    quantization: "", w8a8 or w4a16 (of weights as they are loaded), or a8 (of what they are multiplied with).
    executors_on_host: how many share the host's memory.
    takeover_token: secret that lets a new supervisor take over this id while it is live; None: one of this
    process.
    drain_timeout_s: how long running requests may go on after SIGTERM.
    """

    worker_id: str = Field(min_length=1)
    group: str = Field(default="default", min_length=1)
    model: str = Field(min_length=1)
    scheduler_address: str = Field(min_length=1)
    backend: str = Field(default="cpu", min_length=1)
    backend_options: dict[str, str] = Field(default_factory=dict)
    device: int = Field(default=0, ge=0)
    model_path: str = ""
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = ""
    strict: bool = False
    page_size: int | None = Field(default=None, ge=1)
    max_running_requests: int | None = Field(default=None, ge=1)
    mem_fraction_static: float | None = Field(default=None, gt=0, le=1)
    max_total_tokens: int | None = Field(default=None, ge=1)
    chunked_prefill_size: int | None = Field(default=None, ge=1)
    cache_dir: Path | None = None
    executor: ExecutorConfig = ExecutorConfig()
    executors_on_host: int = Field(default=1, ge=1)
    takeover_token: SecretStr | None = None
    drain_timeout_s: float = Field(default=30.0, ge=0)
