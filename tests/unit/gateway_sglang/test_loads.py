"""Loads of replicas as one engine's."""

from __future__ import annotations

from chipmesh.scheduler.v1alpha1 import admin_pb2
from gateway.sglang_grpc.loads import loads_of

State = admin_pb2.ReplicaStatus


def replica(state: State.State.ValueType, *, held: int, page_size: int, running: int) -> State:
    return State(
        state=state, running=running, waiting=1, max_running_requests=8, retracted_count=2,
        page_size_tokens=page_size, pages=admin_pb2.PageStatus(total=10, free=1, cached=9 - held, held=held),
    )  # fmt: skip


def test_the_replicas_of_the_model_that_serve_are_summed() -> None:
    mesh = admin_pb2.Mesh(
        scheduler=admin_pb2.SchedulerStatus(waiting=3),
        groups=[
            admin_pb2.GroupStatus(
                model="m",
                replicas=[
                    replica(State.STATE_READY, held=2, page_size=16, running=4),
                    replica(State.STATE_DRAINING, held=1, page_size=64, running=2),
                    replica(State.STATE_LOST, held=9, page_size=16, running=8),
                ],
            ),
            admin_pb2.GroupStatus(
                model="other", replicas=[replica(State.STATE_READY, held=9, page_size=1, running=8)]
            ),
        ],
    )  # fmt: skip
    answer = loads_of(mesh, "m", version="chipmesh 1")
    load = answer.loads[0]
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (6, 5, 11)
    assert (load.num_used_tokens, load.max_total_num_tokens) == (96, 800)
    assert load.token_usage == 96 / 800
    assert (load.max_running_requests, load.utilization, load.queues.retracted) == (16, 6 / 16, 4)
    assert answer.dp_rank_count == len(answer.loads) == 1
    assert (answer.aggregate.total_reqs, answer.aggregate.avg_token_usage) == (11, 96 / 800)


def test_a_mesh_without_replicas_has_no_room() -> None:
    load = loads_of(admin_pb2.Mesh(), "m", version="v").loads[0]
    assert (load.max_total_num_tokens, load.token_usage, load.utilization) == (0, 0.0, 0.0)
