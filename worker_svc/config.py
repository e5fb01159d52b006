"""Configuration of one worker: which model on which chip, and how its executor is kept running."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator
from typing_extensions import Self

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
    devices: tuple[int, ...] = ()
    """In place of `device`, where several run the model together: of each rank of this host, in order."""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Ranks that share each layer. Not set: by the devices and the model."""
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    """Stages that the layers are split over. Not set: by the devices and the model."""
    step_timeout_s: float = Field(default=5.0, gt=0)
    """A rank that does not come to a step's communication by then is named, and all are started again."""
    join_timeout_s: float = Field(default=600.0, gt=0)
    """Until all ranks must have read their weights and met."""
    rendezvous: str = ""
    """"HOST:PORT" of rank 0's host, where the ranks of several hosts meet; both sizes must be set then.
    Empty: all are on this host, and meet at a free port.
    """
    first_rank: int = Field(default=0, ge=0)
    """Of the ranks over several hosts the first one on this host. Only the host of rank 0 registers."""
    model_path: str = ""
    """Folder, .gguf, or name of a pulled model."""
    load_format: str = "auto"
    """auto, safetensors, gguf or dummy (random weights)."""
    dtype: str = "auto"
    """auto: the first of the chip's."""
    kv_cache_dtype: str = "auto"
    """auto: the compute dtype, else the first of the chip's. fp8_e4m3, fp8_e5m2, int8: where the chip reports
    them; int8 by the checkpoint's scales only.
    """
    quantization: str = ""
    """w8a8 or w4a16: weights are rounded as they are loaded. a8: what they are multiplied with, where a step
    program does so, else refused. A checkpoint that is quantised already needs none, and takes no other.
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
    """How many share the host's memory and processors, its own among them."""
    takeover_token: SecretStr | None = None
    """Lets a new supervisor take over this id while it is live. Not set: one of this process, which is in its
    log.
    """
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM."""

    @property
    def own_devices(self) -> tuple[int, ...]:
        """The devices of this host's ranks, in order: one where the model is not split."""
        return self.devices or (self.device,)

    @property
    def is_set(self) -> bool:
        """Whether several ranks run the model together."""
        return len(self.own_devices) > 1 or self.spans_hosts

    @property
    def executors_here(self) -> int:
        """How many share this host."""
        return max(self.executors_on_host, len(self.own_devices))

    @property
    def spans_hosts(self) -> bool:
        """Whether there are ranks on other hosts."""
        return bool(self.rendezvous)

    @model_validator(mode="after")
    def _names_each_device_once(self) -> Self:
        if self.devices and "device" in self.model_fields_set:
            raise ValueError("device and devices are both given; devices is for sets of several ranks")
        if any(device < 0 for device in self.devices) or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices is {list(self.devices)}; each is an index from 0, and serves once")
        return self

    @field_validator("rendezvous")
    @classmethod
    def _is_a_meeting_point(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"rendezvous is {value!r}; write HOST:PORT, with a port from 1 to 65535")
        return value

    @model_validator(mode="after")
    def _can_be_a_set(self) -> Self:
        check_set(self)
        return self


def check_set(config: WorkerConfig) -> None:
    """Raises ValueError unless this host's ranks have an address each, and are a set of the sizes given or a
    part of one.
    """
    address = parse_listen(config.executor.listen, field="executor.listen")
    if len(config.devices) > 1 and getattr(address, "port", None) != 0:
        raise ValueError(
            f"executor.listen is {config.executor.listen!r}; {len(config.devices)} executors cannot share "
            "it: use port 0, a free one for each"
        )
    own, tensor, pipeline = (
        len(config.own_devices),
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
    )
    sizes = f"tensor_parallel_size {tensor or 'not set'}, pipeline_parallel_size {pipeline or 'not set'}"
    if not config.spans_hosts:
        if config.first_rank:
            raise ValueError(f"first_rank is {config.first_rank}; set rendezvous, where it meets the others")
        given = (tensor or 1) * (pipeline or 1)
        if own % given or (tensor and pipeline and own != given):
            raise ValueError(
                f"{sizes}: their product is the number of ranks, and there are {own} devices; set devices to "
                "as many, or rendezvous where more are on other hosts"
            )
        return
    if tensor is None or pipeline is None:
        raise ValueError(f"rendezvous is set, so both sizes have to be: {sizes}")
    if config.first_rank + own > tensor * pipeline:
        raise ValueError(
            f"{sizes}: that is {tensor * pipeline} ranks; first_rank {config.first_rank} and {own} devices "
            f"here would need {config.first_rank + own}"
        )
