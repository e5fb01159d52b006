"""Weights as people type them, and the shares that they amount to."""

from __future__ import annotations

import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.cli.traffic import describe_traffic, read_weights
from meshkit.errors import InvalidArgument

READY = admin_pb2.ReplicaStatus(state=admin_pb2.ReplicaStatus.STATE_READY)
LOST = admin_pb2.ReplicaStatus(state=admin_pb2.ReplicaStatus.STATE_LOST)


def test_weights_are_read_by_group() -> None:
    assert read_weights(["gpu=80", "kunlun=20.5", "a=b=0"]) == {"gpu": 80.0, "kunlun": 20.5, "a=b": 0.0}


@pytest.mark.parametrize("word", ["gpu", "=3", "gpu=", "gpu=much", "gpu=-1", "gpu=nan", "gpu=inf"])
def test_a_word_that_is_no_weight_is_refused_and_quoted(word: str) -> None:
    with pytest.raises(InvalidArgument, match="GROUP=WEIGHT"):
        read_weights([word])


def test_a_group_given_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="twice"):
        read_weights(["gpu=1", "gpu=2"])


def test_a_group_without_a_ready_replica_hands_its_share_on() -> None:
    mesh = admin_pb2.Mesh(
        groups=[
            admin_pb2.GroupStatus(name="gpu", model="m", weight=80, replicas=[READY, LOST]),
            admin_pb2.GroupStatus(name="kunlun", model="m", weight=20, replicas=[LOST]),
            admin_pb2.GroupStatus(name="cpu", model="m", weight=20, replicas=[READY]),
        ]
    )
    lines = describe_traffic(mesh)["models"]["m"]
    assert [(line["group"], line["share"], line["ready"]) for line in lines] == [
        ("gpu", 0.8, 1), ("kunlun", 0.0, 0), ("cpu", 0.2, 1),
    ]  # fmt: skip
