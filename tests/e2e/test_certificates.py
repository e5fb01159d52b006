"""A mesh whose services speak with certificates only: they change under streams (S5), and a start is refused
where nothing would protect what is said.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshkit.certificates.folder import CertificateFolder
from meshkit.rpc.policy import Peer, Role
from plugins.hash.oracle import continue_tokens
from tests.support.certificates import LIFETIME
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import MeshClient, token_request
from tests.support.services import Services

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

STREAMS = 8
TOKENS_PER_CHANGE = 100
"""So many that every stream still runs at the last change."""
WORKERS = ("worker-a", "worker-b")
PEERS = [Peer(Role.GATEWAY, "gateway"), Peer(Role.SCHEDULER, "scheduler"), Peer(Role.OPERATOR, "admin"),
         *(Peer(Role.WORKER, name) for name in WORKERS)]  # fmt: skip


class CertifiedMesh:
    """Scheduler, gateway and two workers, all with `tls`."""

    def __init__(self, folder: Path) -> None:
        self.certificates = folder / "certificates"
        self.keeper = CertificateFolder(self.certificates)
        self.keeper.create(PEERS, lifetime=LIFETIME)
        self.services = Services(folder)
        self.model = str(write_hash_model(folder))

    def tls(self, name: str) -> dict[str, str]:
        folder = self.certificates / name
        return {part: str(folder / f"{part}.pem") for part in ("certificate", "key", "authority")}

    def start(self) -> None:
        self.scheduler = self.start_scheduler()["address"]
        self.executors = {name: self.start_worker(name)["executor_address"] for name in WORKERS}
        self.gateway = self.services.start(
            "gateway", "gateway", scheduler_address=self.scheduler, tls=self.tls("gateway-gateway"),
            models=[{"name": "hash", "path": self.model, "load_format": "dummy"}],
        )["address"]  # fmt: skip

    def start_scheduler(self, **more: Any) -> dict[str, Any]:
        return self.services.start("scheduler", "scheduler", tls=self.tls("scheduler-scheduler"), **more)

    def start_worker(self, name: str) -> dict[str, Any]:
        return self.services.start(name, "worker", **self.worker_config(name, tls=self.tls(f"worker-{name}")))

    def worker_config(self, name: str, **more: Any) -> dict[str, Any]:
        return {
            "scheduler_address": self.scheduler, "worker_id": name, "model": "hash", "model_path": self.model,
            "load_format": "dummy", "backend": "hash", "backend_options": {"step_ms": "8"},
            "max_total_tokens": 32768, **more,
        }  # fmt: skip

    def serial_shown_by(self, address: str) -> int:
        """Of the certificate that a listener shows to a new connection of the operator's."""
        context = self.context("operator-admin")
        host, port = address.rsplit(":", 1)
        with (
            socket.create_connection((host, int(port)), timeout=10) as raw,
            context.wrap_socket(raw) as wrapped,
        ):
            return serial_of(ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True) or b""))

    def context(self, name: str) -> ssl.SSLContext:
        files = self.tls(name)
        context = ssl.create_default_context(cafile=files["authority"])
        context.check_hostname = False
        context.load_cert_chain(files["certificate"], files["key"])
        context.set_alpn_protocols(["h2"])
        return context

    def serial_on_disk(self, name: str) -> int:
        return serial_of(Path(self.tls(name)["certificate"]).read_text(encoding="ascii"))


def serial_of(pem: str) -> int:
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def status(address: str, tls: Path | None) -> subprocess.CompletedProcess[str]:
    """`chipmesh status` of an operator with that folder."""
    environment = {**os.environ, **({"CHIPMESH_TLS": str(tls)} if tls else {})}
    return subprocess.run(
        [sys.executable, "-m", "meshkit.cli", "status", "--endpoint", address, "--json"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[CertifiedMesh]:
    mesh = CertifiedMesh(tmp_path)
    try:
        mesh.start()
        yield mesh
    finally:
        mesh.services.stop_all()


class Stream:
    """One client's stream, as far as it has come."""

    def __init__(self, client: MeshClient, index: int, *, tokens: int) -> None:
        self._client = client
        self._tokens = tokens
        self._prompt = [index, 5, 6, 7]
        self.seen: list[int] = []
        self.began = threading.Event()

    def run(self) -> None:
        events = self._client.stream(token_request(self._prompt, max_tokens=self._tokens))
        assert next(events).WhichOneof("kind") == "accepted"
        for event in events:
            assert event.output.first_index == len(self.seen) or event.WhichOneof("kind") == "finished"
            self.seen.extend(event.output.token_ids)
            self.began.set()
        assert self.seen == continue_tokens(self._prompt, self._tokens, VOCAB_SIZE)


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.nightly)])
def test_certificates_and_authority_change_many_times_under_streams_and_none_is_dropped(
    mesh: CertifiedMesh, tmp_path: Path, times: int
) -> None:
    old = tmp_path / "old-operator"
    shutil.copytree(mesh.certificates / "operator-admin", old)
    assert status(mesh.scheduler, old).returncode == 0
    client = MeshClient(mesh.gateway)
    streams = [Stream(client, index, tokens=times * TOKENS_PER_CHANGE) for index in range(STREAMS)]
    reached: list[int] = []
    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            running = [pool.submit(stream.run) for stream in streams]
            assert all(stream.began.wait(30) for stream in streams)
            for _ in range(times):
                mesh.keeper.rotate(lifetime=LIFETIME, new_authority=True)
                mesh.keeper.retire()
                reached.append(min(len(stream.seen) for stream in streams))
            ended = [task.done() for task in running]
            # What was there goes on; what comes now meets the new ones, and brings its own.
            assert mesh.serial_shown_by(mesh.scheduler) == mesh.serial_on_disk("scheduler-scheduler")
            for name in WORKERS:
                assert mesh.serial_shown_by(mesh.executors[name]) == mesh.serial_on_disk(f"worker-{name}")
            mesh.services.kill("worker-b")
            again = mesh.start_worker("worker-b")["executor_address"]
            assert mesh.serial_shown_by(again) == mesh.serial_on_disk("worker-worker-b")
            mesh.services.kill("scheduler")
            mesh.start_scheduler(listen=mesh.scheduler)
            for task in running:
                task.result()
    finally:
        client.close()
    assert not any(ended), f"streams ended before the last change, at {reached}: this test has shown nothing"
    assert "certificate changed" in mesh.services.log("worker-a"), "no connection was made anew"
    refused = status(mesh.scheduler, old)
    assert refused.returncode == 1
    shown = status(mesh.scheduler, mesh.certificates / "operator-admin")
    assert shown.returncode == 0, shown.stderr
    states = {
        replica["worker"]: replica["state"]
        for group in json.loads(shown.stdout)["groups"]
        for replica in group["replicas"]
    }
    assert states == dict.fromkeys(WORKERS, "ready")


def test_without_a_certificate_or_with_another_workers_nobody_gets_in(mesh: CertifiedMesh) -> None:
    plain = status(mesh.scheduler, None)
    assert plain.returncode == 1
    assert "--tls" in plain.stderr
    assert status(mesh.scheduler, mesh.certificates / "gateway-gateway").returncode == 1
    stolen = mesh.worker_config("worker-c", tls=mesh.tls("worker-worker-b"))
    process = mesh.services.spawn("thief", "worker", **stolen)
    code = process.wait(timeout=60)
    del mesh.services.running["thief"]
    last = mesh.services.log("thief").splitlines()[-1]
    assert code == 1, last
    assert "worker-c" in last
    assert "worker-b" in last


@pytest.mark.parametrize(
    ("kind", "field", "config"),
    [
        ("scheduler", "listen", {"listen": "0.0.0.0:0"}),
        ("worker", "executor.listen", {"scheduler_address": "127.0.0.1:1", "worker_id": "w", "model": "m",
                                       "executor": {"listen": "0.0.0.0:0"}}),
        ("worker", "scheduler_address", {"scheduler_address": "10.0.0.1:1", "worker_id": "w", "model": "m"}),
        ("gateway", "scheduler_address", {"scheduler_address": "10.0.0.1:1",
                                          "models": [{"name": "m", "context_length": 8, "vocab_size": 9}]}),
    ],
)  # fmt: skip
def test_a_service_that_others_would_reach_in_plain_text_does_not_start(
    tmp_path: Path, kind: str, field: str, config: dict[str, Any]
) -> None:
    services = Services(tmp_path)
    assert services.spawn("it", kind, **config).wait(timeout=60) == 2
    last = services.log("it").splitlines()[-1]
    assert last.startswith(f"{kind}: {field} is ")
    assert "insecure_network" in last
    assert "tls" in last


def test_a_network_that_is_said_to_be_trusted_is_warned_of(tmp_path: Path) -> None:
    services = Services(tmp_path)
    services.start("scheduler", "scheduler", listen="0.0.0.0:0", insecure_network=True)
    services.stop_all()
    assert "insecure_network: whoever is on this network" in services.log("scheduler")
