"""What the probes have seen, as plain values. Sizes in bytes, times in seconds, unless the name says else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from chipmesh.scheduler.v1alpha1.admin_pb2 import Mesh
from meshkit.cli.state import ServiceKind

PortRole = Literal["grpc", "http", "openai", "executor"]


@dataclass(frozen=True)
class Target:
    """A service to look at.

    config: effective configuration, {} where none is known. config_error: why it cannot be used. pid,
    executor_pid, addresses: as its ready file tells, else as configured; None: not known.
    """

    name: str
    kind: ServiceKind
    address: str | None = None
    http_address: str | None = None
    executor_address: str | None = None
    openai_address: str | None = None
    pid: int | None = None
    executor_pid: int | None = None
    config_file: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    config_error: str | None = None

    @property
    def executor_name(self) -> str:
        """What findings call its executor."""
        return f"executor of {self.name}"

    @property
    def asked_address(self) -> str | None:
        """Where the doctor asks over gRPC; None where it has no address, or one of the public's TLS, whose
        authority it does not know.
        """
        return None if self.kind == "gateway" and self.config.get("listen_tls") else self.address

    @property
    def start_command(self) -> str:
        """How a person starts it."""
        if self.config_file is None:
            return f"start the {self.kind}"
        return f"start it: chipmesh {self.kind} --config {self.config_file}"


@dataclass(frozen=True)
class Owner:
    """The process of this host that listens on a port."""

    pid: int
    command: str

    @property
    def is_ours(self) -> bool:
        """Whether its command line is one of chipmesh."""
        return any(word in self.command for word in ("chipmesh", "meshkit", "worker_svc"))


@dataclass(frozen=True)
class PortFacts:
    """One address of a service. error: why no connection was made; None: one was. speaks: whether what
    answers is the protocol that is meant; None: nobody answered in time. owner: None where it cannot be seen.
    """

    service: str
    role: PortRole
    address: str
    error: str | None = None
    speaks: bool | None = None
    owner: Owner | None = None
    expected_pid: int | None = None


@dataclass(frozen=True)
class ClockFacts:
    """A service's wall clock less ours: certainly between these seconds (positive: it is ahead)."""

    low_s: float
    high_s: float

    @property
    def certain_s(self) -> float:
        """The least skew that explains what was seen; 0 where none is needed."""
        if self.low_s > 0:
            return self.low_s
        return self.high_s if self.high_s < 0 else 0.0


@dataclass(frozen=True)
class LagFacts:
    """Wake-ups of an event loop while the doctor looked, and those of them later than LATE_S, VERY_LATE_S."""

    wakeups: int
    late: int
    very_late: int


@dataclass(frozen=True)
class ServiceFacts:
    """What a service answered.

    grpc_health: SERVING, NOT_SERVING, ..., or None with `grpc_error`. http_serving: None where it was not
    asked or did not answer (`http_error`). parts: of /health. version: as it reports it.
    counters: metrics by name, summed over their labels. keepalive_lost: an idle connection with our client's
    settings was ended by the other side; None: none could be held.
    """

    target: Target
    grpc_health: str | None = None
    grpc_error: str | None = None
    http_serving: bool | None = None
    http_error: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    clock: ClockFacts | None = None
    lag: LagFacts | None = None
    keepalive_lost: bool | None = None


@dataclass(frozen=True)
class ExecutorFacts:
    """What a worker's executor answered. on_host: its device's memory is the host's; None: it did not say."""

    target: Target
    error: str | None = None
    readiness: str | None = None
    message: str = ""
    contract: str | None = None
    on_host: bool | None = None
    pci_addresses: tuple[str, ...] = ()
    keepalive_lost: bool | None = None


@dataclass(frozen=True)
class GroupLimits:
    """The tightest limits of a process' control groups and their ancestors; None: no limit.

    memory_used leaves out what the kernel gives back on demand. throttled_share: of the scheduling periods.
    """

    memory_limit: int | None = None
    memory_used: int | None = None
    memory_file: str = ""
    oom_kills: int = 0
    pids_limit: int | None = None
    pids_used: int = 0
    quota_cores: float | None = None
    throttled_share: float = 0.0


@dataclass(frozen=True)
class ProcessFacts:
    """A process of this host. state: R, S, D, T (stopped), ... as /proc says; "" where it is gone.

    owner: the service. threads_wanted: OMP_NUM_THREADS as it was started with. processors: that it may use.
    """

    owner: str
    kind: Literal["service", "executor"]
    pid: int
    state: str
    open_files: int | None = None
    files_limit: int | None = None
    resident: int = 0
    swapped: int = 0
    threads_wanted: int | None = None
    processors: int | None = None
    groups: GroupLimits = GroupLimits()
    service: str = ""


@dataclass(frozen=True)
class Busy:
    """A process that is none of the mesh, and the processors that it takes (1.0: one of them)."""

    pid: int
    command: str
    processors: float


@dataclass(frozen=True)
class HostFacts:
    """This host. others, stolen: processors taken by what is none of the mesh, and by the hypervisor.

    copy_bytes_per_s: of one thread, by its own processor time. best_copy_bytes_per_s: the best that was ever
    measured here; None: this is the first time.
    """

    processors: int
    memory: int
    swap: int = 0
    swap_used: int = 0
    shm: int | None = None
    shm_free: int | None = None
    others: float = 0.0
    stolen: float = 0.0
    busiest: tuple[Busy, ...] = ()
    copy_bytes_per_s: float | None = None
    best_copy_bytes_per_s: float | None = None


@dataclass(frozen=True)
class ChipFacts:
    """An accelerator in sysfs. root: its root complex ("pci0000:17"). port: the root port above it, None
    where it hangs on the root complex itself. iommu_group: None where the IOMMU is off.
    """

    address: str
    root: str
    port: str | None
    iommu_group: str | None


@dataclass(frozen=True)
class CertificateFacts:
    """One set of files. expected_role, expected_name: whose it must be, None where any is right. error: why
    it cannot be read. key_mode: permission bits. authority_matches: it was signed by one of `authority.pem`.
    is_public: of a listener for anybody, which names no role. users: services whose configuration names it.
    """

    folder: str
    error: str | None = None
    subject: str = ""
    role: str | None = None
    name: str | None = None
    dns_names: tuple[str, ...] = ()
    not_before: datetime | None = None
    not_after: datetime | None = None
    key_matches: bool = True
    key_mode: int = 0o600
    key_file: str = ""
    authority_matches: bool = True
    expected_role: str | None = None
    expected_name: str | None = None
    is_authority: bool = False
    is_public: bool = False
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerNeed:
    """Memory that a worker needs for weights and KV cache, by its configuration and what it reported."""

    worker: str
    weights: int
    kv_cache: int


@dataclass(frozen=True)
class Facts:
    """All of it. now: for certificates. mesh: None where the scheduler did not answer (`mesh_error`)."""

    now: datetime
    own_version: str
    targets: tuple[Target, ...] = ()
    mesh: Mesh | None = None
    mesh_error: str | None = None
    services: tuple[ServiceFacts, ...] = ()
    executors: tuple[ExecutorFacts, ...] = ()
    ports: tuple[PortFacts, ...] = ()
    processes: tuple[ProcessFacts, ...] = ()
    host: HostFacts | None = None
    chips: tuple[ChipFacts, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()
    needs: tuple[WorkerNeed, ...] = ()
