"""`chipmesh traffic` against a scheduler: what it asks for, and how it shows what holds."""

from __future__ import annotations

import json

import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.cli import main
from tests.contract.cli.conftest import ScriptedScheduler

READY = admin_pb2.ReplicaStatus(worker="w", state=admin_pb2.ReplicaStatus.STATE_READY)


def a_mesh() -> admin_pb2.Mesh:
    """Two groups that serve, the first mirrored to the second, and one that was rolled back."""
    shadow = admin_pb2.ShadowStatus(
        shadow_group="kunlun", share=0.1, mirrored=10, compared=8, identical=6, tokens=400, equal_tokens=380
    )
    return admin_pb2.Mesh(
        groups=[
            admin_pb2.GroupStatus(name="gpu", model="m", weight=75, replicas=[READY], shadow=shadow),
            admin_pb2.GroupStatus(name="kunlun", model="m", weight=25, replicas=[READY]),
            admin_pb2.GroupStatus(
                name="new",
                model="m",
                weight=0,
                replicas=[READY],
                rolled_back="9 of the last 20 requests failed",
            ),
        ]
    )


def test_weights_are_set_and_what_holds_then_is_printed(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.mesh = a_mesh()
    words = ["traffic", "set", "gpu=75", "kunlun=25", "--model", "m", "--endpoint", scheduler_address]
    assert main([*words, "--json"]) == 0
    assert scheduler.traffic is not None
    assert (scheduler.traffic.model, dict(scheduler.traffic.weights)) == ("m", {"gpu": 75, "kunlun": 25})
    lines = json.loads(capsys.readouterr().out)["models"]["m"]
    assert [(line["group"], line["share"]) for line in lines] == [
        ("gpu", 0.75),
        ("kunlun", 0.25),
        ("new", 0.0),
    ]
    assert lines[0]["shadow"]["agreement"] == 0.95
    assert lines[2]["rolled_back"] == "9 of the last 20 requests failed"


def test_a_shadow_is_asked_for(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.mesh = a_mesh()
    words = ["traffic", "shadow", "gpu", "kunlun", "--share", "0.1", "--endpoint", scheduler_address]
    assert main(words) == 0
    assert scheduler.shadow is not None
    assert (scheduler.shadow.source_group, scheduler.shadow.shadow_group) == ("gpu", "kunlun")
    text = capsys.readouterr().out
    assert "95.0% agree" in text
    assert "rolled back" in text


def test_wrong_weights_are_a_wrong_command_line(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["traffic", "set", "gpu=much", "--endpoint", scheduler_address]) == 2
    assert "'much'" in capsys.readouterr().err
    assert scheduler.traffic is None
