"""`chipmesh status` against a scheduler."""

from __future__ import annotations

import json

import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.cli import main
from tests.contract.cli.conftest import ScriptedScheduler


def a_mesh() -> admin_pb2.Mesh:
    """Two groups: one with a replica, one still empty."""
    replica = admin_pb2.ReplicaStatus(
        worker="worker-0",
        chip="hash",
        emulated=True,
        instance_id="i1",
        state=admin_pb2.ReplicaStatus.STATE_READY,
        running=2,
        waiting=1,
        pages=admin_pb2.PageStatus(total=10, free=5, cached=3, held=2),
    )
    return admin_pb2.Mesh(
        scheduler=admin_pb2.SchedulerStatus(pid=42, gateways=1),
        groups=[
            admin_pb2.GroupStatus(name="default", model="m", weight=1.0, replicas=[replica]),
            admin_pb2.GroupStatus(name="spare", model="m", weight=0.0),
        ],
    )


def test_json_has_the_documented_form(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.mesh = a_mesh()
    assert main(["status", "--endpoint", scheduler_address, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["scheduler"]["pid"] == 42
    assert [(group["name"], group["weight"]) for group in status["groups"]] == [
        ("default", 1.0),
        ("spare", 0.0),
    ]
    (replica,) = status["groups"][0]["replicas"]
    documented = ("worker", "chip", "emulated", "instance_id", "state", "running", "waiting", "pages")
    assert {name: replica[name] for name in documented} == {
        "worker": "worker-0",
        "chip": "hash",
        "emulated": True,
        "instance_id": "i1",
        "state": "ready",
        "running": 2,
        "waiting": 1,
        "pages": {"total": 10, "free": 5, "cached": 3, "held": 2},
    }


def test_people_see_every_group_even_an_empty_one(
    scheduler: ScriptedScheduler,
    scheduler_address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    scheduler.mesh = a_mesh()
    assert main(["status", "--endpoint", scheduler_address]) == 0
    shown = capsys.readouterr().out
    replica = next(line for line in shown.splitlines() if "worker-0" in line)
    assert " ".join(replica.split()) == "default m 1 worker-0 hash (emulated) ready 2 1 5 3 2 10"
    assert any(line.split() == ["spare", "m", "0", "none"] for line in shown.splitlines())


def test_the_ranks_of_a_set_are_shown_with_devices_and_processes(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.mesh = a_mesh()
    replica = scheduler.mesh.groups[0].replicas[0]
    replica.tensor_parallel_size, replica.pipeline_parallel_size = 2, 1
    for rank in range(2):
        replica.ranks.add(rank=rank, device=rank + 4, pid=rank + 100, address=f"127.0.0.1:{rank + 1}")
    assert main(["status", "--endpoint", scheduler_address]) == 0
    shown = capsys.readouterr().out
    assert "worker worker-0 is a set of 2 ranks (tensor parallel 2, pipeline parallel 1)" in shown
    assert "0: device 4, pid 100, 1: device 5, pid 101" in shown
    assert main(["status", "--endpoint", scheduler_address, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["groups"][0]["replicas"]
    assert told["ranks"][1] == {"rank": 1, "device": 5, "pid": 101, "address": "127.0.0.1:2"}


def test_a_scheduler_that_is_not_there_is_told_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--endpoint", "127.0.0.1:1", "--json"]) == 1
    output = capsys.readouterr()
    assert "no scheduler answers at 127.0.0.1:1" in output.err
    assert json.loads(output.out)["error"]["code"] == "UNAVAILABLE"
