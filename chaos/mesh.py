"""A mesh of real processes, on loopback or on hosts, each started, killed and started again on its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from chaos.clocks import Clocks, variables
from chaos.faulty_child import FaultyChild
from chaos.hosts import Network
from chaos.links import executor_link, executor_socket, open_links
from chaos.processes import until
from chaos.proxy import Proxy
from chaos.text_model import write_text_model
from chaos.view import MeshView
from meshkit.certificates.folder import CertificateFolder, folder_name
from meshkit.cli.child import Child, last_error_line
from meshkit.cli.events import LaunchEvent
from meshkit.cli.processes import ProcessRecord, is_alive, send_signal
from meshkit.cli.scheduler_channel import tls_files
from meshkit.cli.state import ServiceKind, StateDir
from meshkit.cli.stopping import stop_services
from meshkit.config import TlsConfig
from meshkit.errors import FailedPrecondition
from meshkit.rpc.policy import Peer, Role

VOCAB_SIZE = 32_000
CONTEXT_TOKENS = 131_072
"""Of the hash model without a folder."""
MODEL = "hash"
TEXT_MODEL = "letters"
"""Served by gateways of some shapes, beside the other; no worker has it."""
DEADLY_TOKEN = VOCAB_SIZE - 1
"""A request whose prompt begins with it kills a worker at once."""
LATE_DEADLY_TOKEN = VOCAB_SIZE - 2
LATE_POSITION = 150
"""A request whose prompt begins with LATE_DEADLY_TOKEN kills a worker when it is so long."""
START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 5.0
OPERATOR = "chaos"
ORPHAN_TIMEOUT_S = 8.0


@dataclass(frozen=True)
class Shape:
    """What a scenario wants of its mesh. Options go over the harness' own, which go over the defaults.

    step_ms: least time of a step. Others: named as in the services' configurations.
    """

    workers: int = 2
    ranks: int = 1
    """Of each worker's set."""
    gateways: int = 1
    step_ms: float = 10.0
    backend_options: Mapping[str, str] = field(default_factory=dict)
    worker: Mapping[str, Any] = field(default_factory=dict)
    executor: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    gateway: Mapping[str, Any] = field(default_factory=dict)
    text_model: bool = False
    """Gateways also serve TEXT_MODEL, see chaos.text_model."""
    clocks: bool = False
    """Each process has a wall clock of its own, see chaos.clocks."""
    has_proxies: bool = False
    """Services reach each other through ChaosMesh.links."""
    loses_messages: bool = False
    """Single messages from and to the scheduler can be lost, see ChaosMesh.message_faults."""
    hosts: bool = False
    """Each service is on a host of its own, and they speak TLS among each other: see chaos.hosts."""


class ChaosMesh:
    """One scheduler, gateways and workers. Names: scheduler, gateway-0, worker-0 and so on."""

    def __init__(self, shape: Shape, *, root: Path) -> None:
        self.shape = shape
        self._state = StateDir(root)
        self._state.prepare()
        self._children: dict[str, Child] = {}
        self._addresses: dict[str, str] = {}
        self._executors: set[ProcessRecord] = set()
        self.frozen: set[ProcessRecord] = set()
        """Processes that a scenario has stopped; they go on before the mesh ends."""
        self.links: dict[str, Proxy] = {}
        """By name (see chaos.links); empty where the shape has none."""
        self.network = Network()
        """Hosts by the names of their services, where the shape has hosts."""
        self._certificates = self._state.root / "certificates"
        operator = self._tls(Peer(Role.OPERATOR, OPERATOR))
        self.view = MeshView(lambda: self._addresses["scheduler"], tls=operator)
        self.clocks = Clocks(self._state.root / "clocks")

    def __repr__(self) -> str:
        return f"<ChaosMesh {', '.join(self._children)}>"

    @property
    def worker_names(self) -> list[str]:
        """All workers, alive or not."""
        return [f"worker-{index}" for index in range(self.shape.workers)]

    @property
    def gateway_names(self) -> list[str]:
        """All gateways, alive or not."""
        return [f"gateway-{index}" for index in range(self.shape.gateways)]

    async def start(self) -> None:
        """Start everything; returns when the scheduler says that all workers are ready.

        Raises:
            FailedPrecondition: a service ended while it started. TimeoutError: one was not ready in time.
        """
        if self.shape.hosts:
            await self._furnish_hosts()
        await self.start_service("scheduler")
        if self.shape.has_proxies:
            scheduler, root = self.address("scheduler"), self._state.root
            self.links = await open_links(
                self.gateway_names, self.worker_names, scheduler=scheduler, root=root
            )
        await asyncio.gather(
            *(self.start_service(name) for name in (*self.gateway_names, *self.worker_names))
        )
        await self.until_ready()

    async def start_service(self, name: str) -> None:
        """Start one, where it was before; returns when it says that it is ready. Raises as `start`."""
        before = self._children.get(name)
        if before is not None:
            await until(
                lambda: before.exit_code() is not None, timeout_s=EXIT_TIMEOUT_S, what=f"{name} exits"
            )
        kind, config = self._configuration(name)
        with variables(self._environment()):
            child = self._children[name] = self._start_child(name, kind, config)

        def is_ready() -> bool:
            if child.exit_code() is not None:
                raise FailedPrecondition(f"{name} did not start: {last_error_line(child.log)}")
            return child.read_ready() is not None

        await until(is_ready, timeout_s=START_TIMEOUT_S, what=f"{name} is ready", poll_s=0.02)
        self._addresses[name] = str((child.read_ready() or {})["address"])

    def _start_child(self, name: str, kind: ServiceKind, config: dict[str, Any]) -> Child:
        if kind == "scheduler" and self.shape.loses_messages:
            self.message_faults.mkdir(exist_ok=True)
            return FaultyChild(name, kind, config=config, state=self._state, faults=self.message_faults)
        within = self.network[name].enter if self.shape.hosts else ()
        return Child(name, kind, config=config, state=self._state, within=within)

    async def _furnish_hosts(self) -> None:
        names = ["scheduler", *self.gateway_names, *self.worker_names]
        await self.network.open(names)
        peers = [*(_peer(name) for name in names), Peer(Role.OPERATOR, OPERATOR)]
        folder = CertificateFolder(self._certificates)
        await asyncio.to_thread(folder.create, peers, lifetime=timedelta(days=1))

    def _tls(self, peer: Peer) -> TlsConfig | None:
        return tls_files(self._certificates / folder_name(peer)) if self.shape.hosts else None

    @property
    def message_faults(self) -> Path:
        """Where the scheduler looks for chaos.message_faults."""
        return self._state.root / "message-faults"

    def address(self, name: str) -> str:
        """Where a service listens."""
        return self._addresses[name]

    def http_address(self, name: str) -> str:
        """Where a service tells of its health and metrics."""
        return str(self._children[name].record().http_address)

    def executor_address(self, worker: str) -> str:
        """Where a worker's present executor listens."""
        return str(self._children[worker].record().details["executor_address"])

    def process(self, name: str) -> ProcessRecord:
        """The process of a service; of a worker its supervisor."""
        return self._children[name].identity

    def fault_file(self, worker: str) -> Path:
        """What a worker's hash back end looks for, see plugins.hash.options."""
        return self._state.root / "faults" / worker

    async def terminate(self, name: str, *, timeout_s: float = 30.0) -> int:
        """SIGTERM, and wait for the end: the exit code. Raises TimeoutError."""
        child = self._children[name]
        send_signal(child.identity, signal.SIGTERM)
        await until(
            lambda: child.exit_code() is not None, timeout_s=timeout_s, what=f"{name} ends at SIGTERM"
        )
        return child.exit_code() or 0

    async def until_ready(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when every worker is ready in the scheduler's view. Raises TimeoutError."""
        await self.view.until_settled(self.worker_names, timeout_s=timeout_s)
        for replica in await self.view.replicas():
            self._executors.update(replica.ranks)

    async def stop(self) -> list[str]:
        """Stop everything in order; what was wrong with that, in words."""
        for process in self.frozen:
            send_signal(process, signal.SIGCONT)
        for link in self.links.values():
            link.heal()
        killed: list[str] = []

        def report(event: LaunchEvent) -> None:
            if event.kind == "stopped" and event.message:
                killed.append(f"{event.service} {event.message}")

        await self.view.close()
        records = [child.record() for child in self._children.values()]
        await asyncio.to_thread(stop_services, records, report=report)
        problems = [*killed, *await self._bad_exits(), *await self._end_orphans()]
        for link in self.links.values():
            await link.close()
        if self.shape.hosts:
            await self.network.close()
        return problems

    async def _bad_exits(self) -> list[str]:
        def all_reaped() -> bool:
            return all(child.exit_code() is not None for child in self._children.values())

        # A process whose main thread has ended looks gone, but has no exit code before its last thread ends.
        try:
            await until(all_reaped, timeout_s=EXIT_TIMEOUT_S, what="services exit", poll_s=0.02)
        except TimeoutError as error:
            return [str(error)]
        codes = {name: child.exit_code() for name, child in self._children.items()}
        return [f"{name} ended with {code} at SIGTERM" for name, code in codes.items() if code != 0]

    async def _end_orphans(self) -> list[str]:
        """No executor may outlive its supervisor."""

        def all_gone() -> bool:
            return not any(is_alive(executor) for executor in self._executors)

        try:
            await until(all_gone, timeout_s=ORPHAN_TIMEOUT_S, what="executors end", poll_s=0.05)
        except TimeoutError:
            orphans = [executor for executor in self._executors if is_alive(executor)]
            for orphan in orphans:
                send_signal(orphan, signal.SIGKILL)
            return [f"executor {orphan.pid} outlived its supervisor" for orphan in orphans]
        return []

    def _environment(self) -> dict[str, str]:
        return self.clocks.environment() if self.shape.clocks else {}

    # ------------------------------------------------------------ configurations

    def _configuration(self, name: str) -> tuple[ServiceKind, dict[str, Any]]:
        common: dict[str, Any] = {
            "listen": self._addresses.get(name, self._any_port(name)),
            "http_listen": self._any_port(name),
            "ready_file": str(self._state.ready_file(name)),
        }
        if (tls := self._tls(_peer(name))) is not None:
            common["tls"] = tls.model_dump(mode="json")
        if name == "scheduler":
            return "scheduler", {**common, **self._scheduler()}
        if name in self.gateway_names:
            return "gateway", {**common, **self._gateway(name)}
        return "worker", {**common, **self._worker(name)}

    def _any_port(self, name: str) -> str:
        return f"{self.network[name].address if self.shape.hosts else '127.0.0.1'}:0"

    def _scheduler(self) -> dict[str, Any]:
        return {
            "groups": [{"name": "default", "model": MODEL}],
            "drain_grace_s": 0.5,
            **self.shape.scheduler,
        }

    def _gateway(self, name: str) -> dict[str, Any]:
        model = {"name": MODEL, "context_length": CONTEXT_TOKENS, "vocab_size": VOCAB_SIZE}
        models: list[dict[str, Any]] = [model]
        if self.shape.text_model:
            folder = write_text_model(self._state.root / TEXT_MODEL)
            models.append({"name": TEXT_MODEL, "path": str(folder)})
        # Its clients are on another host; keys have tests of their own.
        anonymous = {"allow_anonymous": True} if self.shape.hosts else {}
        return {
            "scheduler_address": self._scheduler_seen_by(name),
            "models": models,
            **anonymous,
            **self.shape.gateway,
        }

    def _scheduler_seen_by(self, name: str) -> str:
        link = self.links.get(name)
        return self._addresses["scheduler"] if link is None else link.address

    def _executor(self, name: str) -> dict[str, Any]:
        link = self.links.get(executor_link(name))
        if link is None:
            return {"listen": self._any_port(name), **self.shape.executor}
        # A socket file, so that the proxy knows where the next executor will be, too.
        listen = executor_socket(name, root=self._state.root)
        return {"listen": listen, "advertise": link.address, **self.shape.executor}

    def _devices(self, worker: int) -> dict[str, Any]:
        ranks = self.shape.ranks
        if ranks == 1:
            return {"device": worker}
        return {"devices": list(range(worker * ranks, (worker + 1) * ranks))}

    def _worker(self, name: str) -> dict[str, Any]:
        self.fault_file(name).parent.mkdir(exist_ok=True)
        options = {
            "step_ms": str(self.shape.step_ms),
            "fault_file": str(self.fault_file(name)),
            "die_on_token": f"{DEADLY_TOKEN},{LATE_DEADLY_TOKEN}:{LATE_POSITION}",
        }
        return {
            "worker_id": name,
            "model": MODEL,
            "scheduler_address": self._scheduler_seen_by(name),
            "backend": "hash",
            "backend_options": {**options, **self.shape.backend_options},
            **self._devices(self.worker_names.index(name)),
            "page_size": 16,
            "max_total_tokens": 256 * 1024,
            "max_running_requests": 256,
            "executors_on_host": self.shape.workers * self.shape.ranks,
            "executor": self._executor(name),
            "drain_timeout_s": 1.0,
            **self.shape.worker,
        }


def _peer(name: str) -> Peer:
    """Who a service is by its certificate."""
    return Peer(Role(name.partition("-")[0]), name)
