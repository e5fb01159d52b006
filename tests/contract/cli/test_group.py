"""`chipmesh group set` against a scheduler."""

from __future__ import annotations

import json

import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.cli import main
from tests.contract.cli.conftest import ScriptedScheduler


def test_what_is_given_is_set_and_what_holds_for_each_replica_is_printed(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = admin_pb2.ReplicaStatus(worker="w0", chunk_tokens=512, max_running_requests=8)
    lost = admin_pb2.ReplicaStatus(worker="w1")
    scheduler.mesh.groups.add(name="gpu", model="m", replicas=[replica, lost])
    words = ["group", "set", "gpu", "--max-running-requests", "8", "--endpoint", scheduler_address, "--json"]
    assert main(words) == 0
    assert scheduler.group == admin_pb2.SetGroupRequest(group="gpu", max_running_requests=8)
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "group": "gpu",
        "replicas": [{"worker": "w0", "chunk_tokens": 512, "max_running_requests": 8}],
    }


def test_a_command_that_sets_nothing_is_refused(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["group", "set", "gpu", "--endpoint", scheduler_address]) != 0
    assert "nothing to set" in capsys.readouterr().err
    assert scheduler.group is None
