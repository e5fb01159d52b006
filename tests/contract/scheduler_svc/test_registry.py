"""Register, Heartbeat, Deregister: what they refuse, and who may take a worker's place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chipmesh.scheduler.v1alpha1 import registry_pb2
from meshkit.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from tests.contract.scheduler_svc.fake_peers import FakeSupervisor, registration, until


async def test_register_answers_with_the_lease_and_the_schedulers_id(mesh: Any) -> None:
    async with mesh(heartbeat_interval_s=0.3, lease_duration_s=1.5) as m:
        executor = await m.executor()
        lease = await (await m.supervisor("w0")).register(registration(executor))
        assert lease.lease_id
        assert lease.heartbeat_interval.ToMilliseconds() == 300
        assert lease.lease_duration.ToMilliseconds() == 1500
        assert lease.scheduler_id == m.service.scheduler_id


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"instance_id": ""}, "instance_id"),
        ({"executor_address": ""}, "executor_address"),
        ({"executor_address": "10.0.0.1:1"}, "executor_address"),
        ({"group": ""}, "group"),
        ({"model": ""}, "model"),
        ({"page_count": 0}, "page_count"),
        ({"page_size_tokens": 0}, "page_size_tokens"),
        ({"max_slots": 0}, "max_slots"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
async def test_a_registration_with_a_bad_field_is_refused_by_name(
    mesh: Any, changes: dict[str, Any], field: str
) -> None:
    async with mesh() as m:
        request = registration(await m.executor(), **changes)
        with pytest.raises(InvalidArgument) as caught:
            await (await m.supervisor("w0")).register(request)
        assert caught.value.field == field


async def test_another_contract_version_is_refused_naming_both_and_other_workers_go_on(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w1")
        request = registration(await m.executor())
        request.plugin.contract_version = "77.3"
        with pytest.raises(FailedPrecondition, match=r"77\.3.*scheduler \d") as caught:
            await (await m.supervisor("w0")).register(request)
        assert caught.value.reason == "CONTRACT_VERSION_MISMATCH"
        assert (await m.replicas()).keys() == {"w1"}


async def test_a_group_of_another_model_and_an_unknown_strict_group_are_refused(mesh: Any) -> None:
    async with mesh(groups=[{"name": "g", "model": "m"}], strict_groups=True) as m:
        executor = await m.executor()
        supervisor = await m.supervisor("w0")
        with pytest.raises(InvalidArgument, match="serves 'm'"):
            await supervisor.register(registration(executor, model="other"))
        with pytest.raises(InvalidArgument, match="not configured") as caught:
            await supervisor.register(registration(executor, group="other"))
        assert caught.value.field == "group"


async def test_the_same_instance_registers_again_under_the_same_lease_and_link(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        supervisor = m.supervisors["w0"]
        first = supervisor.lease
        again = await supervisor.register(registration(executor))
        assert again.lease_id == first.lease_id
        assert executor.epoch == 1


async def test_a_second_live_worker_of_one_id_is_refused_unless_it_knows_the_token(mesh: Any) -> None:
    async with mesh() as m:
        executor, other = await m.executor(), await m.executor()
        await (await m.supervisor("w0")).register(registration(executor, takeover_token="secret"))
        intruder = FakeSupervisor(m.address)
        m.supervisors["intruder"] = intruder
        for token in ("", "wrong"):
            with pytest.raises(AlreadyExists, match="takeover_token") as caught:
                await intruder.register(registration(other, supervisor_pid=999, takeover_token=token))
            assert caught.value.field == "worker_id"
        await intruder.register(registration(other, supervisor_pid=999, takeover_token="secret"))
        await m.until_ready("w0", other.instance_id)
        await until(m.supervisors["w0"].lease_refused.is_set, "the old supervisor's lease is refused")


async def test_an_instance_that_the_lease_holder_announced_may_register(mesh: Any) -> None:
    async with mesh() as m:
        executor, new = await m.worker("w0"), await m.executor()
        supervisor = m.supervisors["w0"]
        supervisor.stop_beating()
        await supervisor.heartbeat(registration(executor), instance_id=new.instance_id)
        assert (
            m.service.pool.member("w0").state.name == "LOST" or not m.service.pool.member("w0").link.attached
        )
        await supervisor.register(registration(new, supervisor_pid=4242))
        await m.until_ready("w0", new.instance_id)


async def test_a_heartbeat_without_a_lease_is_not_found_and_one_without_a_state_is_refused(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        supervisor = m.supervisors["w0"]
        with pytest.raises(NotFound, match="register again"):
            await supervisor.heartbeat(registration(executor), lease_id="other")
        with pytest.raises(NotFound):
            await supervisor.heartbeat(registration(executor), worker_id="nobody")
        with pytest.raises(InvalidArgument) as caught:
            await supervisor.heartbeat(registration(executor), executor_state=0)
        assert caught.value.field == "executor_state"


async def test_deregister_takes_the_worker_away_and_an_old_lease_changes_nothing(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        supervisor = m.supervisors["w0"]
        stale = registry_pb2.DeregisterRequest(worker_id="w0", lease_id="old")
        await supervisor.registry.Deregister(stale)
        assert (await m.replicas()).keys() == {"w0"}
        supervisor.stop_beating()
        request = registry_pb2.DeregisterRequest(worker_id="w0", lease_id=supervisor.lease.lease_id)
        for _ in range(2):
            await supervisor.registry.Deregister(request)
            assert await m.replicas() == {}


async def test_ceilings_of_worker_group_and_scheduler_apply_together(mesh: Any) -> None:
    groups = [{"name": "g", "model": "m", "max_running_requests": 5, "chunked_prefill_size": 64}]
    async with mesh(groups=groups, max_running_requests=6, chunked_prefill_size=128) as m:
        await m.worker("w0", max_slots=8, chunk_tokens=100)
        await m.worker("w1", max_slots=4, chunk_tokens=32)
        await m.worker("w2", max_slots=8, group="other")
        replicas = await m.replicas()
        seen = {name: (r.max_running_requests, r.chunk_tokens) for name, r in replicas.items()}
        assert seen == {"w0": (5, 64), "w1": (4, 32), "w2": (6, 128)}


async def test_the_ranks_of_a_set_are_in_the_mesh_and_so_is_which_of_them_was_lost(mesh: Any) -> None:
    async with mesh() as m:
        executor, supervisor = await m.executor(), await m.supervisor("w0")
        request = registration(executor, tensor_parallel_size=2, pipeline_parallel_size=1)
        for rank in range(2):
            request.ranks.add(rank=rank, device=rank + 4, pid=rank + 100, address=f"127.0.0.1:{rank + 1}")
        await supervisor.register(request)
        replica = (await m.replicas())["w0"]
        assert (replica.tensor_parallel_size, replica.pipeline_parallel_size) == (2, 1)
        assert [(each.rank, each.device, each.pid) for each in replica.ranks] == [(0, 4, 100), (1, 5, 101)]
        supervisor.stop_beating()
        dead = registry_pb2.HeartbeatRequest.EXECUTOR_STATE_DEAD
        await supervisor.heartbeat(request, executor_state=dead, message="rank 1 was ended by signal 9")
        # The start of its successor takes a while, through which it can be read.
        starting = registry_pb2.HeartbeatRequest.EXECUTOR_STATE_STARTING
        await supervisor.heartbeat(request, executor_state=starting, instance_id="next")
        assert (await m.replicas())["w0"].message == "rank 1 was ended by signal 9"


async def test_a_scheduler_that_was_itself_held_up_ends_no_lease_on_that_account(mesh: Any) -> None:
    async with mesh(lease_duration_s=0.4, heartbeat_interval_s=0.1) as m:
        await m.worker("w0")
        m.supervisors["w0"].stop_beating()
        pool, member = m.service.pool, m.service.pool.member("w0")
        member.lease_timer.cancel()
        member.lease_until = asyncio.get_running_loop().time() - 5
        pool._check_lease(member, member.lease_until)
        assert member.lost is None, "heartbeats of those five seconds may wait unread"
        await until(lambda: member.lost, "no heartbeat came in the time given to read them")
