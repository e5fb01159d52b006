"""What an executor is told at its start: one line of JSON on its stdin."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshkit.config import FrozenConfig, LogLevel, TlsConfig, TracingConfig


class ExecutorSettings(FrozenConfig):
    """One executor's life.

    instance_id: new for every process. listen: "HOST:PORT" or "unix:PATH".
    hung_after_s: a step that runs for longer means that the device hangs: the probe says UNHEALTHY.
    span_attributes: put on the spans of requests (worker, group, model).
    tls: the worker's. worker: its name; of all workers only this one commands the executor, by its
    certificate.
    """

    backend: str
    instance_id: str = Field(min_length=1)
    backend_options: dict[str, str] = Field(default_factory=dict)
    device: int = Field(default=0, ge=0)
    listen: str = "127.0.0.1:0"
    cache_dir: Path | None = None
    tracing: TracingConfig = TracingConfig()
    log_level: LogLevel = "info"
    reflection: bool = False
    hung_after_s: float = Field(default=120.0, gt=0)
    span_attributes: dict[str, str] = Field(default_factory=dict)
    tls: TlsConfig | None = None
    worker: str = ""
