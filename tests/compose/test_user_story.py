"""What a user does with the mesh in containers: start it, stream, change a chip, lose a service, stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.compose.engine import EMULATED, GATEWAY_ADDRESS, SERVICES, ComposeMesh, docker, wait_until
from tests.compose.streams import Streams
from tests.support.golden import load_golden
from tests.support.mesh import MeshClient, token_request

pytestmark = [pytest.mark.compose, pytest.mark.timeout(300)]

PAUSE_S = 3.0
"""Several times a lease."""
OF_THE_MACHINE = {"contention", "loop-lag"}
"""Checks that warn of what else runs there: of these tests' own clients, too."""
Streaming = Callable[[], Streams]


def test_up_gives_two_workers_and_the_references_tokens_at_the_published_port(mesh: ComposeMesh) -> None:
    mesh.wait_until_serving("worker-a", "worker-b")
    golden = load_golden()[0]
    client = MeshClient(GATEWAY_ADDRESS)
    try:
        answer = client.generate(token_request(golden.prompt_token_ids, max_tokens=48))
    finally:
        client.close()
    golden.check(answer.token_ids, where="in containers")
    assert answer.messages > 1, "it came as one piece"


def test_only_the_gateway_is_published_and_only_on_loopback(mesh: ComposeMesh) -> None:
    published = {name: mesh.inspect(name)["HostConfig"]["PortBindings"] or {} for name in SERVICES}
    assert [name for name in SERVICES if published[name]] == ["gateway"]
    addresses = [binding["HostIp"] for bindings in published["gateway"].values() for binding in bindings]
    assert set(addresses) == {"127.0.0.1"}
    network = json.loads(docker("network", "inspect", "chipmesh_mesh"))[0]
    assert network["Internal"], "the services' own network has a way out"


@pytest.mark.nightly
def test_the_doctor_finds_no_fault_in_a_mesh_that_is_up_and_names_a_paused_worker(mesh: ComposeMesh) -> None:
    mesh.wait_until_serving("worker-a", "worker-b")
    healthy = mesh.doctor()
    assert faults_in(healthy) == {}
    warned = {each["id"]: each["findings"] for each in healthy["checks"] if each["status"] == "warning"}
    assert warned.keys() <= OF_THE_MACHINE, warned
    assert sum(each["status"] == "ok" for each in healthy["checks"]) >= 15
    mesh.compose("pause", "worker-b")
    try:
        wait_until(lambda: not mesh.is_serving("worker-b"), what=mesh.status, timeout_s=20)
        assert any("worker-b" in text for text in faults_in(mesh.doctor()).values())
    finally:
        mesh.compose("unpause", "worker-b")
    mesh.wait_until_serving("worker-a", "worker-b")


def faults_in(report: dict[str, Any]) -> dict[str, str]:
    """What a doctor's report calls a fault, by check."""
    return {
        each["id"]: json.dumps(each["findings"]) for each in report["checks"] if each["status"] == "fault"
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_confined(mesh: ComposeMesh, service: str) -> None:
    found = mesh.inspect(service)
    host = found["HostConfig"]
    assert found["Config"]["User"] == "10001:10001"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert not host["Privileged"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] > 0
    assert host["PidsLimit"] > 0
    assert host["LogConfig"]["Config"].keys() == {"max-file", "max-size"}
    status = docker("exec", found["Id"], "cat", "/proc/1/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["Uid"].split() == ["10001"] * 4
    assert facts["NoNewPrivs"] == "1"
    assert int(facts["CapEff"], 16) == 0


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_its_own_certificate_only_and_cannot_change_it(mesh: ComposeMesh, service: str) -> None:
    found = mesh.inspect(service)
    listed = docker("exec", found["Id"], "find", "/etc/chipmesh/tls", "-type", "f", "-printf", "%f %m %U\\n")
    assert sorted(listed.split("\n")[:-1]) == [
        "authority.pem 644 10001", "certificate.pem 644 10001", "key.pem 600 10001",
    ]  # fmt: skip
    (mount,) = (each for each in found["Mounts"] if each["Destination"] == "/etc/chipmesh/tls")
    assert not mount["RW"]
    assert mount["Name"] == f"chipmesh_certificates-{service}"
    keys = [docker("exec", mesh.inspect(name)["Id"], "cat", "/etc/chipmesh/tls/key.pem") for name in SERVICES]
    assert len(set(keys)) == len(SERVICES)


def test_only_an_operator_and_the_scheduler_itself_may_ask_the_scheduler(mesh: ComposeMesh) -> None:
    ask = ("chipmesh", "status", "--endpoint", "scheduler:50061", "--json")
    worker = mesh.inspect("worker-a")["Id"]
    for environment in ((), ("--env", "CHIPMESH_TLS=/etc/chipmesh/tls")):
        command = ["docker", "exec", *environment, worker, *ask]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1, refused.stdout
    answer = json.loads(mesh.compose("run", "--rm", "operator", *ask[1:]))
    assert answer["scheduler"]["gateways"] == 1


@pytest.mark.nightly
def test_certificates_change_under_streams_and_a_new_worker_is_let_in(
    mesh: ComposeMesh, streaming: Streaming
) -> None:
    read_serial = ("run", "--rm", "certificates", "certs", "show", "/certificates", "--json")
    before = json.loads(mesh.compose(*read_serial))["certificates"]
    kept = {name: mesh.identity(name) for name in ("gateway", "scheduler", "worker-b")}
    with streaming() as streams:
        streams.wait_for_more(1)
        mesh.compose("run", "--rm", "certificates", "certs", "rotate", "/certificates", "--authority")
        mesh.compose("restart", "worker-a")
        mesh.wait_until_serving("worker-a", "worker-b")
        streams.wait_for_more()
    after = json.loads(mesh.compose(*read_serial))["certificates"]
    assert not {each["serial"] for each in after if "former" not in each["folder"]} & {
        each["serial"] for each in before
    }
    assert {name: mesh.identity(name) for name in kept} == kept


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_an_image_without_a_worker_has_no_torch_and_no_other_service(mesh: ComposeMesh, service: str) -> None:
    container = mesh.inspect(service)["Id"]
    lacking = [
        "torch",
        "plugins",
        "worker_svc",
        {"gateway": "scheduler_svc", "scheduler": "gateway"}[service],
    ]
    question = f"import importlib.util as u; print([n for n in {lacking} if u.find_spec(n) is not None])"
    assert docker("exec", container, "python3", "-c", question).strip() == "[]"


@pytest.mark.nightly
def test_a_stopped_worker_ends_in_order_and_costs_no_stream(mesh: ComposeMesh, streaming: Streaming) -> None:
    with streaming() as streams:
        streams.wait_for_more(1)
        mesh.compose("stop", "worker-a")
        streams.wait_for_more()
        assert mesh.inspect("worker-a")["State"]["ExitCode"] == 0
        mesh.compose("start", "worker-a")
        mesh.wait_until_serving("worker-a")
        streams.wait_for_more()


def test_a_worker_that_crashes_is_started_again_and_costs_no_stream(
    mesh: ComposeMesh, streaming: Streaming
) -> None:
    _, pid, started = mesh.identity("worker-a")
    with streaming() as streams:
        streams.wait_for_more(1)
        # Not `docker kill`: after that the engine would not start it again, since it was asked for.
        os.kill(pid, signal.SIGKILL)
        streams.wait_for_more()
        mesh.wait_until_healthy("worker-a")
        mesh.wait_until_serving("worker-a")
        streams.wait_for_more()
    assert mesh.identity("worker-a")[2] != started


def test_a_worker_recreated_as_another_chip_under_streams_leaves_all_else_alone(
    mesh: ComposeMesh, streaming: Streaming
) -> None:
    others = ("gateway", "scheduler", "worker-a")
    before = {name: mesh.identity(name) for name in others}
    old = mesh.identity("worker-b")
    with streaming() as streams:
        streams.wait_for_more(1)
        mesh.compose("up", "-d", "--force-recreate", "worker-b", overlays=[EMULATED])
        mesh.wait_until_serving("worker-b")
        wait_until(
            lambda: (mesh.replica("worker-b") or {}).get("step_seq", 0) > 0, what=mesh.status, timeout_s=60
        )
        streams.wait_for_more()
        replica = mesh.replica("worker-b")
    assert mesh.identity("worker-b") != old
    assert replica is not None
    assert (replica["chip"], replica["emulated"]) == ("kunlun", True)
    assert {name: mesh.identity(name) for name in others} == before


def address_of(container: str) -> str:
    (found,) = json.loads(docker("inspect", container))
    return str(found["NetworkSettings"]["Networks"]["chipmesh_mesh"]["IPAddress"])


@contextmanager
def taken(address: str, *, image: str) -> Iterator[None]:
    """Containers on the mesh's network, as many as it takes until one of them has got `address`."""
    squatters: list[str] = []
    try:
        while address not in map(address_of, squatters):
            assert len(squatters) < 8, f"nobody gets {address}"
            started = docker("run", "-d", "--network", "chipmesh_mesh", "--entrypoint", "sleep", image, "300")
            squatters.append(started.strip())
        yield
    finally:
        for squatter in squatters:
            docker("rm", "-f", "-v", squatter)


@pytest.mark.nightly
def test_a_killed_worker_comes_back_at_another_address(mesh: ComposeMesh, streaming: Streaming) -> None:
    scheduler, old = mesh.identity("scheduler"), mesh.inspect("worker-b")["Id"]
    old_address = address_of(old)
    with streaming() as streams:
        streams.wait_for_more(1)
        docker("kill", "--signal", "KILL", old)
        with taken(old_address, image=mesh.inspect("gateway")["Image"]):
            mesh.compose("up", "-d", "worker-b")
            mesh.wait_until_serving("worker-b")
            assert address_of(mesh.inspect("worker-b")["Id"]) != old_address
            streams.wait_for_more()
    assert mesh.identity("scheduler") == scheduler


def test_streams_go_on_after_the_scheduler_was_killed(mesh: ComposeMesh, streaming: Streaming) -> None:
    workers = {name: mesh.identity(name) for name in ("worker-a", "worker-b")}
    _, pid, started = mesh.identity("scheduler")
    with streaming() as streams:
        streams.wait_for_more(1)
        os.kill(pid, signal.SIGKILL)
        streams.wait_for_more()
        mesh.wait_until_serving("worker-a", "worker-b")
    assert mesh.identity("scheduler")[2] != started
    assert {name: mesh.identity(name) for name in workers} == workers


@pytest.mark.parametrize("service", [pytest.param("worker-a", marks=pytest.mark.nightly), "scheduler"])
def test_streams_survive_a_paused_service(mesh: ComposeMesh, streaming: Streaming, service: str) -> None:
    before = {name: mesh.identity(name) for name in SERVICES}
    with streaming() as streams:
        streams.wait_for_more(1)
        mesh.compose("pause", service)
        try:
            assert mesh.inspect(service)["State"]["Paused"]
            streams.look_on(PAUSE_S)
        finally:
            mesh.compose("unpause", service)
        streams.wait_for_more()
        mesh.wait_until_serving("worker-a", "worker-b")
    assert {name: mesh.identity(name) for name in SERVICES} == before


def test_a_chip_is_swapped_inside_its_container_under_streams(
    mesh: ComposeMesh, streaming: Streaming
) -> None:
    before = {name: mesh.identity(name) for name in SERVICES}
    with streaming() as streams:
        streams.wait_for_more(1)
        docker("exec", before["scheduler"][0], "chipmesh", "swap", "worker-b", "--to", "kunlun", "--emulate",
               "--endpoint", "127.0.0.1:50061")  # fmt: skip
        replica = mesh.replica("worker-b")
    assert replica is not None
    assert (replica["chip"], replica["emulated"]) == ("kunlun", True)
    assert {name: mesh.identity(name) for name in SERVICES} == before


def test_stop_ends_every_service_in_order(mesh: ComposeMesh) -> None:
    mesh.compose("stop")
    assert {name: mesh.inspect(name)["State"]["ExitCode"] for name in SERVICES} == dict.fromkeys(SERVICES, 0)
