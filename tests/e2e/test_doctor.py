"""`chipmesh doctor` on a real mesh: green where all is well, and naming the one fault that was planted.

How busy the machine is decides nothing here but the hog's test: other tests run beside these.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from chaos.clocks import variables
from chaos.mesh import ChaosMesh, Shape
from chaos.processes import freeze, thaw
from meshkit.certificates.folder import CertificateFolder
from meshkit.cli.child import Child, last_error_line
from meshkit.cli.state import ServiceKind, StateDir
from meshkit.cli.stopping import stop_services
from meshkit.rpc.policy import Peer, Role
from tests.support.hash_model import write_hash_model
from tests.support.mesh import running_mesh
from tests.support.sysfs import plant_pci_device

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

HAS_COMPILER = shutil.which("cc") is not None
SHAPE = Shape(clocks=HAS_COMPILER)
LOAD = frozenset({"contention", "loop-lag"})
"""Checks of how busy the machine is."""
AT_ONCE = 6
ROOT = "doctor-mesh"
DRIVER = """
import json, sys
from pathlib import Path
from meshkit.cli.doctor.command import run_doctor
given = json.loads(sys.argv[1])
paths = {name: Path(given[name]) for name in ("tls", "sysfs") if given[name]}
configs = [Path(each) for each in given.get("configs", ())]
sys.exit(run_doctor(as_json=True, configs=configs, gateway=given.get("gateway"), **paths))
"""
HOG = "import numpy; a = numpy.ones(1 << 27, numpy.uint8); b = a.copy()\nwhile True: numpy.copyto(b, a)"
HOLDER = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    "sys.stdin.read()"
)


@dataclass(frozen=True)
class Told:
    """What one run said."""

    exit_code: int
    report: dict[str, Any]

    def statuses(self) -> dict[str, str]:
        """By check."""
        return {check["id"]: check["status"] for check in self.report["checks"]}

    @property
    def fault_count(self) -> int:
        """Checks that found a fault."""
        return sum(status == "fault" for status in self.statuses().values())

    def findings(self, *, of: str | None = None) -> list[tuple[str, str, str, str]]:
        """(check, status, subject, what), without those about the load of the machine unless `of` is one."""
        return [
            (check["id"], finding["status"], finding["subject"], finding["found"])
            for check in self.report["checks"]
            for finding in check["findings"]
            if check["id"] == of or check["id"] not in LOAD
        ]


@dataclass(frozen=True)
class Doctor:
    """Looks at one mesh; by default together with good certificates and two chips with links of their own."""

    state_dir: Path
    configs: tuple[Path, ...]
    tls: Path
    sysfs: Path

    async def look(self, *, extra_configs: tuple[Path, ...] = (), **given: str) -> Told:
        """One run, as a process of its own; `given` goes over the defaults."""
        configs = [str(each) for each in (*self.configs, *extra_configs)]
        words = {"tls": str(self.tls), "sysfs": str(self.sysfs), "configs": configs, **given}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DRIVER, json.dumps(words),
            env={**os.environ, "CHIPMESH_STATE_DIR": str(self.state_dir)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await process.communicate()
        assert process.returncode in (0, 1), errors.decode()
        return Told(process.returncode or 0, json.loads(out))


def plant_chips(sysfs: Path, *paths: str) -> Path:
    for path in paths:
        plant_pci_device(sysfs, path)
    return sysfs


def make_certificates(folder: Path, *, worker_is_of: datetime, life_days: int = 90) -> Path:
    """An operator's for years, and a worker's that was made on that day."""
    keeper = CertificateFolder(folder, now=worker_is_of)
    keeper.create([Peer(Role.OPERATOR, "admin")], lifetime=timedelta(days=3650))
    keeper.create([Peer(Role.WORKER, "worker-0")], lifetime=timedelta(days=life_days))
    return folder


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosMesh]:
    mesh = ChaosMesh(SHAPE, root=tmp_path_factory.getbasetemp() / ROOT)
    await mesh.start()
    yield mesh
    assert await mesh.stop() == []


@pytest.fixture(scope="module")
def doctor(mesh: ChaosMesh, tmp_path_factory: pytest.TempPathFactory) -> Doctor:
    folder = tmp_path_factory.mktemp("doctor")
    names = ("scheduler", *mesh.gateway_names, *mesh.worker_names)
    files = StateDir(tmp_path_factory.getbasetemp() / ROOT)
    return Doctor(
        state_dir=folder / "state",
        configs=tuple(files.config_file(name) for name in names),
        tls=make_certificates(folder / "certs", worker_is_of=datetime.now(timezone.utc)),
        sysfs=plant_chips(
            folder / "sys", "pci0000:17/0000:17:00.0/0000:18:00.0", "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
        ),
    )


# ---------------------------------------------------------------- faults beside the mesh, all at once


@contextmanager
def program_on_a_port() -> Iterator[tuple[int, int]]:
    """(pid, port) of a program that is none of chipmesh."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            yield holder.pid, int(holder.stdout.readline())
        finally:
            holder.kill()


async def strict_server() -> tuple[grpc.aio.Server, str]:
    """A gRPC server with gRPC's own defaults, as a proxy may be: it bears a ping in five minutes."""
    server, health = grpc.aio.server(), HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
async def told(doctor: Doctor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What the doctor says with each fault that does not touch the mesh; and without any."""
    folder = tmp_path_factory.mktemp("planted")
    old = make_certificates(
        folder / "old", worker_is_of=datetime.now(timezone.utc) - timedelta(days=40), life_days=30
    )
    loose = shutil.copytree(doctor.tls, folder / "loose")
    (loose / "worker-worker-0/key.pem").chmod(0o644)
    shared = plant_chips(
        folder / "sys", "pci0000:17/0000:17:00.0/0000:18:00.0", "pci0000:17/0000:17:01.0/0000:19:00.0"
    )
    server, address = await strict_server()
    with program_on_a_port() as (pid, port):
        config = folder / "gateway-7.json"
        config.write_text(json.dumps({
            "listen": f"127.0.0.1:{port}", "scheduler_address": "127.0.0.1:1",
            "models": [{"name": "hash", "context_length": 64}],
        }))  # fmt: skip
        looks = {
            "nothing": doctor.look(),
            "expired certificate": doctor.look(tls=str(old)),
            "key for all": doctor.look(tls=str(loose)),
            "one root complex": doctor.look(sysfs=str(shared)),
            "keepalive": doctor.look(gateway=address),
            f"port held by {pid}": doctor.look(extra_configs=(config,)),
        }
        limit = asyncio.Semaphore(AT_ONCE)

        async def limited(name: str) -> tuple[str, Told]:
            async with limit:
                return name, await looks[name]

        told = dict(await asyncio.gather(*(limited(name) for name in looks)))
    await server.stop(0)
    return told


async def test_a_healthy_mesh_is_green_in_every_check(told: dict[str, Told]) -> None:
    green = told["nothing"]
    assert green.findings() == []
    others = {name: status for name, status in green.statuses().items() if name not in LOAD}
    assert set(others.values()) == {"ok"}, others
    assert len(others) >= 20
    assert green.exit_code == green.fault_count


@pytest.mark.parametrize(
    ("fault", "check", "status", "subject", "words"),
    [
        ("expired certificate", "certificates", "fault", "old/worker-worker-0", "has expired"),
        ("key for all", "certificates", "fault", "loose/worker-worker-0", "has mode 0644"),
        ("one root complex", "chip-links", "warning", "chips 0000:18:00.0, 0000:19:00.0", "root complex"),
        ("keepalive", "keepalive", "fault", "gateway at 127.0.0.1:", "too_many_pings"),
        ("port held by", "ports", "fault", "gateway-7", "held by another program"),
    ],
)
async def test_a_planted_fault_beside_the_mesh_is_named_alone(
    told: dict[str, Told], fault: str, check: str, status: str, subject: str, words: str
) -> None:
    name = next(name for name in told if name.startswith(fault))
    (finding,) = told[name].findings()
    assert finding[:2] == (check, status)
    assert subject in finding[2]
    assert words in finding[3]
    if fault == "port held by":
        assert f"pid {name.split()[-1]}" in finding[3]
    assert told[name].exit_code == told[name].fault_count


# ---------------------------------------------------------------- faults of the mesh, one after another


async def only_finding(doctor: Doctor, *, of: str | None = None) -> tuple[str, str, str, str]:
    """The one thing that is found now."""
    (finding,) = (await doctor.look()).findings(of=of)
    return finding


async def test_a_stopped_worker_is_named_and_all_that_follows_from_it_is_told_there(
    mesh: ChaosMesh, doctor: Doctor
) -> None:
    worker = mesh.process("worker-0")
    await freeze([worker])
    try:
        told = await doctor.look()
    finally:
        await thaw([worker])
    (finding,) = told.findings()
    assert finding[:3] == ("processes", "fault", "worker-0")
    assert f"process {worker.pid} is stopped" in finding[3]
    (processes,) = (check for check in told.report["checks"] if check["id"] == "processes")
    followed = {each.partition(":")[0] for each in processes["findings"][0]["consequences"]}
    assert {"health", "replicas"} <= followed
    assert told.exit_code == 1
    await mesh.until_ready()


@pytest.mark.nightly
async def test_too_low_a_limit_of_open_files_is_named(mesh: ChaosMesh, doctor: Doctor) -> None:
    pid = mesh.process("gateway-0").pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        finding = await only_finding(doctor)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert finding[:3] == ("limits.open-files", "fault", "gateway-0")
    assert "may open 64 files" in finding[3]


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_COMPILER, reason="a process' own clock needs a C compiler")
async def test_a_clock_that_was_moved_is_named(mesh: ChaosMesh, doctor: Doctor) -> None:
    gateway = mesh.process("gateway-0")
    mesh.clocks.set(gateway, offset_s=-3600.0)
    try:
        finding = await only_finding(doctor)
    finally:
        mesh.clocks.set(gateway, offset_s=0.0)
    assert finding[:3] == ("clocks", "fault", "gateway-0")
    assert "behind this host's" in finding[3]


@pytest.mark.nightly
async def test_a_hog_that_takes_processors_and_memory_bandwidth_is_named(doctor: Doctor) -> None:
    hogs = [await asyncio.create_subprocess_exec(sys.executable, "-c", HOG) for _ in range(2)]
    try:
        told = await doctor.look()
    finally:
        for hog in hogs:
            hog.kill()
            await hog.wait()
    found = told.findings(of="contention")
    assert {each[:3] for each in found} == {("contention", "warning", "this host")}
    # The hypervisor may take its share beside them.
    assert any(f"pid {hog.pid}" in each[3] for each in found for hog in hogs), found


@pytest.mark.nightly
async def test_a_group_that_no_worker_serves_is_named(mesh: ChaosMesh, doctor: Doctor) -> None:
    mesh.shape = replace(
        SHAPE,
        scheduler={"groups": [{"name": "default", "model": "hash"}, {"name": "spare", "model": "hash"}]},
    )
    await restart_scheduler(mesh)
    try:
        finding = await only_finding(doctor)
    finally:
        mesh.shape = SHAPE
    assert finding[:3] == ("groups", "fault", "group spare")
    assert "has no replica" in finding[3]


async def test_a_scheduler_of_another_version_is_named(
    mesh: ChaosMesh, doctor: Doctor, tmp_path: Path
) -> None:
    other = tmp_path / "chipmesh-99.0.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: chipmesh\nVersion: 99.0.0\n")
    with variables({"PYTHONPATH": str(tmp_path)}):
        await restart_scheduler(mesh)
    try:
        finding = await only_finding(doctor)
    finally:
        await restart_scheduler(mesh)
    assert finding[:3] == ("versions", "fault", "scheduler")
    assert "99.0.0" in finding[3]


async def restart_scheduler(mesh: ChaosMesh) -> None:
    """As mesh.shape says now; returns when the workers are back."""
    await mesh.terminate("scheduler")
    await mesh.start_service("scheduler")
    await mesh.until_ready()


async def test_a_mesh_with_certificates_is_looked_at_with_an_operators(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "mesh")
    with mesh_with_certificates(state, tmp_path / "certs") as names:
        configs = tuple(state.config_file(name) for name in names)
        doctor = Doctor(tmp_path / "state", configs, tls=tmp_path / "certs", sysfs=tmp_path)
        # Without one a scheduler may look at its own mesh: it is on this host, and its key is readable.
        for told in await asyncio.gather(doctor.look(), doctor.look(tls="")):
            assert told.findings() == []
            assert told.statuses()["certificates"] == told.statuses()["keepalive"] == "ok"


@contextmanager
def mesh_with_certificates(state: StateDir, folder: Path) -> Iterator[list[str]]:
    """Names of a scheduler, a gateway and a worker that speak TLS."""
    state.prepare()
    roles = {"scheduler": Role.SCHEDULER, "gateway": Role.GATEWAY, "worker-0": Role.WORKER}
    peers = [*(Peer(role, name) for name, role in roles.items()), Peer(Role.OPERATOR, "admin")]
    CertificateFolder(folder).create(peers, lifetime=timedelta(days=90))
    children: list[Child] = []

    def start(name: str, **config: Any) -> str:
        own = folder / f"{roles[name].value}-{name}"
        tls = {each: str(own / f"{each}.pem") for each in ("certificate", "key", "authority")}
        common = {"tls": tls, "ready_file": str(state.ready_file(name))}
        kind = roles[name].value
        assert kind in ("scheduler", "gateway", "worker")
        child = Child(name, cast("ServiceKind", kind), config={**common, **config}, state=state)
        children.append(child)
        return str(ready_of(child)["address"])

    try:
        address = start("scheduler", groups=[{"name": "default", "model": "m"}])
        worker = {"worker_id": "worker-0", "model": "m", "backend": "hash", "max_total_tokens": 4096}
        start("worker-0", scheduler_address=address, executors_on_host=2, **worker)
        start("gateway", scheduler_address=address, models=[{"name": "m", "context_length": 64}])
        yield list(roles)
    finally:
        stop_services([child.record() for child in children], report=lambda _: None)
        # A process whose main thread has ended looks gone, but has no exit code before its last thread ends.
        wait_for(lambda: all(child.exit_code() is not None for child in children), what="all exit")


def ready_of(child: Child) -> dict[str, Any]:
    """What a service says once it is ready; AssertionError where it ends before."""
    wait_for(lambda: child.read_ready() is not None or child.exit_code() is not None, what=child.name)
    ready = child.read_ready()
    assert ready is not None, last_error_line(child.log)
    return ready


def wait_for(holds: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
    """Return once `holds()`; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


@pytest.mark.nightly
async def test_the_mesh_of_up_needs_no_names(tmp_path: Path) -> None:
    model = write_hash_model(tmp_path)
    started = ("--backend", "hash", "--model-path", str(model), "--load-format", "dummy")
    with running_mesh(tmp_path / "state", *started):
        own = Doctor(tmp_path / "state", (), tls=tmp_path, sysfs=tmp_path)
        told = await own.look()
    assert told.findings() == []
    assert [each["name"] for each in told.report["services"]] == ["scheduler", "worker-0", "gateway"]
    nothing_to_look_at = {name for name, status in told.statuses().items() if status == "skipped"}
    assert nothing_to_look_at == {"certificates", "chip-links"}
