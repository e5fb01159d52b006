"""Sets of executors: the leader hands plans on, all run them in one order, and one end is the end of all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1.execution_pb2 import (
    AllocateKvCacheRequest,
    AllocateKvCacheResponse,
    AttachRequest,
    ExecuteStepsRequest,
    FollowRequest,
    LoadModelRequest,
    ParallelPlace,
    StepPlan,
)
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from chipmesh.device.v1alpha1.plugin_pb2 import ProbeRequest, ProbeResponse
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from meshkit.config import TlsConfig
from meshkit.errors import MeshError, from_rpc_error
from meshkit.ports import reserve_port
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role
from plugins.hash.oracle import continue_tokens
from plugins.sdk.runner import ModelRunner
from tests.contract.worker_svc.harness import INSTANCE, PAGE, PAGES, SLOTS, VOCAB, Harness, admit, chunk
from tests.support.certificates import Pki
from worker_svc.executor.app import Executor
from worker_svc.executor.settings import ExecutorSettings

pytestmark = pytest.mark.timeout(60)

STEP_TIMEOUT_S = 2.0
UNHEALTHY_WITHIN_S = 10.0
WORKER = "worker-1"


@dataclass
class Rank:
    """One executor of a set."""

    executor: Executor
    address: str
    harness: Harness

    async def probe(self) -> ProbeResponse:
        return await PluginServiceStub(self.harness.channel).Probe(ProbeRequest())

    async def until_unhealthy(self) -> str:
        """What it says of its end."""
        deadline = time.monotonic() + UNHEALTHY_WITHIN_S
        while (probe := await self.probe()).readiness != ProbeResponse.READINESS_UNHEALTHY:
            assert time.monotonic() < deadline, f"rank at {self.address} is well: {probe.message}"
            await asyncio.sleep(0.02)
        return str(probe.message)


@dataclass
class RankSet:
    """A loaded set."""

    ranks: list[Rank]
    allocated: list[AllocateKvCacheResponse]

    @property
    def leader(self) -> Harness:
        return self.ranks[0].harness


@asynccontextmanager
async def served(count: int, *, tls: TlsConfig | None = None) -> AsyncIterator[list[Rank]]:
    ranks: list[Rank] = []
    try:
        for number in range(count):
            executor = Executor(
                ExecutorSettings(backend="hash", instance_id=INSTANCE, device=number, worker=WORKER, tls=tls)
            )
            address = await executor.start()
            channel = open_channel(address, traced=False, tls=tls, role=Role.WORKER, name=WORKER)
            ranks.append(Rank(executor, address, Harness(channel, ExecutionServiceStub(channel))))
        yield ranks
    finally:
        for rank in ranks:
            await rank.harness.channel.close()
            await rank.executor.stop(0.2)


def place(rank: int, count: int, *, rendezvous: str, address: str) -> ParallelPlace:
    result = ParallelPlace(
        rank=rank,
        tensor_parallel_size=count,
        pipeline_parallel_size=1,
        rendezvous=rendezvous,
        address=address,
    )
    result.join_timeout.FromSeconds(20)
    result.step_timeout.FromMilliseconds(int(STEP_TIMEOUT_S * 1000))
    return result


async def load(ranks: list[Rank], *, pages: list[int] | None = None) -> RankSet:
    with reserve_port() as port:

        async def one(number: int, rank: Rank) -> AllocateKvCacheResponse:
            parallel = place(number, len(ranks), rendezvous=f"tcp://127.0.0.1:{port}", address=rank.address)
            async for _ in rank.harness.execution.LoadModel(
                LoadModelRequest(parallel=parallel, device=number)
            ):
                pass
            count = PAGES if pages is None else pages[number]
            return await rank.harness.execution.AllocateKvCache(
                AllocateKvCacheRequest(page_count=count, page_size_tokens=PAGE, max_slots=SLOTS)
            )

        return RankSet(ranks, list(await asyncio.gather(*(one(*each) for each in enumerate(ranks)))))


@pytest.fixture
async def three() -> AsyncIterator[RankSet]:
    """Hash ranks fail a step unless all of them made the same tokens in it."""
    async with served(3) as ranks:
        yield await load(ranks)


async def test_all_ranks_run_the_leaders_plans_and_the_tokens_are_those_of_one_rank(three: RankSet) -> None:
    driver = await three.leader.drive()
    await driver.step(admitted=[admit(0, [3, 9, 1, 30])], prefill=[chunk(0, [5, 6, 7])])
    for _ in range(12):
        await driver.send(decode=True)
    for _ in range(12):
        await driver.result()
    assert driver.tokens[0] == continue_tokens([5, 6, 7], 13, VOCAB)
    for rank in three.ranks[1:]:
        assert (await rank.probe()).message.startswith("1 slots in use")
    driver.call.cancel()


async def test_every_rank_allocates_the_least_that_one_of_them_has_and_the_answer_names_all() -> None:
    async with served(2) as ranks:
        loaded = await load(ranks, pages=[PAGES, PAGES // 2])
        for answer in loaded.allocated:
            assert (answer.page_count, answer.max_slots) == (PAGES // 2, SLOTS)
            assert [(each.rank, each.address, each.device) for each in answer.ranks] == [
                (number, rank.address, number) for number, rank in enumerate(ranks)
            ]
        assert (await loaded.leader.attach()).page_count == PAGES // 2


async def test_a_scheduler_that_attaches_anew_while_plans_are_queued_leaves_the_ranks_in_step(
    three: RankSet,
) -> None:
    first = await three.leader.drive()
    await first.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [1, 2])])
    for _ in range(20):
        await first.send(decode=True)
    second = await three.leader.drive()
    await second.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [8, 9])])
    for _ in range(4):
        await second.step(decode=True)
    assert second.tokens[0] == continue_tokens([8, 9], 5, VOCAB)
    second.call.cancel()


async def test_a_stream_that_is_cancelled_in_the_middle_leaves_the_ranks_in_step(three: RankSet) -> None:
    for turn in range(5):
        driver = await three.leader.drive()
        await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [turn + 1])])
        for _ in range(10):
            await driver.send(decode=True)
        await driver.result()
        driver.call.cancel()
    for rank in three.ranks:
        assert (await rank.probe()).readiness == ProbeResponse.READINESS_READY


async def test_a_plan_that_is_wrong_is_refused_by_all_and_the_set_lives_on(three: RankSet) -> None:
    driver = await three.leader.drive()
    await driver.send_plan(StepPlan(epoch=driver.epoch, step_seq=1, prefill=[chunk(7, [1])]))
    with pytest.raises(grpc.aio.AioRpcError, match="slot"):
        await driver.result()
    again = await three.leader.drive()
    await again.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [5])])
    await again.step(decode=True)
    assert again.tokens[0] == continue_tokens([5], 2, VOCAB)
    again.call.cancel()


async def test_a_ranks_end_ends_the_leaders_stream_at_once_and_names_the_rank(three: RankSet) -> None:
    driver = await three.leader.drive()
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [5])])
    lost = three.ranks.pop(1)
    await lost.harness.channel.close()
    await lost.executor.stop(0.1)
    error = await refusal(driver.result())
    assert (error.reason, error.code) == ("RANK_LOST", grpc.StatusCode.UNAVAILABLE)
    assert f"rank 1 at {lost.address} was lost" in error.message
    assert f"rank 1 at {lost.address} was lost" in await three.ranks[0].until_unhealthy()
    # Nobody may attach to what is left: the supervisor replaces all of it.
    assert (await refusal(three.leader.attach())).reason == "RANK_LOST"


async def test_the_leaders_end_is_the_end_of_every_other_rank(three: RankSet) -> None:
    driver = await three.leader.drive()
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [5])])
    driver.call.cancel()
    leader = three.ranks.pop(0)
    await leader.harness.channel.close()
    await leader.executor.stop(0.1)
    for rank in three.ranks:
        assert f"its leader, rank 0 at {leader.address}, was lost" in await rank.until_unhealthy()


async def test_a_rank_that_does_not_come_to_a_step_is_named_and_the_leader_takes_no_more(
    three: RankSet,
) -> None:
    driver = await three.leader.drive()
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [5])])
    late = three.ranks[2].executor
    blocked = asyncio.Event()
    loop = asyncio.get_running_loop()
    released = threading.Event()
    try:
        late._device.submit(lambda: (loop.call_soon_threadsafe(blocked.set), released.wait()))
        await asyncio.wait_for(blocked.wait(), 5)
        error = await refusal(driver.step(decode=True))
        assert (error.reason, "rank 2 did not come" in error.message) == ("RANKS_MISSING", True)
        assert "rank 2 did not come" in await three.ranks[0].until_unhealthy()
    finally:
        released.set()


async def test_ranks_that_part_from_their_leader_end_the_set(
    three: RankSet,
) -> None:
    driver = await three.leader.drive()
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [5])])
    engine = three.ranks[1].executor._engine
    assert engine is not None
    engine.attach(99)  # As if the rank had missed a message: it refuses what the leader runs.
    await driver.send(decode=True)
    error = await refusal(driver.result())
    assert "rank 1" in error.message
    assert error.reason in {"RANK_LOST", "RANKS_MISSING"}


async def test_only_rank_0_takes_a_scheduler_and_only_the_others_follow(three: RankSet) -> None:
    follower = three.ranks[1].harness.execution
    for call in (
        follower.Attach(AttachRequest(scheduler_id="s", instance_id=INSTANCE)),
        all_answers(
            follower.ExecuteSteps(iter([ExecuteStepsRequest(plans=[StepPlan(epoch=1, step_seq=1)])]))
        ),
    ):
        error = await refusal(call)
        assert (error.reason, "rank 1 of a set" in error.message) == ("NOT_THE_LEADER", True)
    led = await refusal(all_answers(three.leader.execution.Follow(iter([FollowRequest()]))))
    assert led.reason == "NOT_A_FOLLOWER"
    await three.leader.attach()
    driver = await three.leader.drive()
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [5])])
    assert (await refusal(all_answers(follower.Follow(iter([FollowRequest()]))))).reason == "IS_LED"
    driver.call.cancel()


async def test_a_backend_that_runs_on_one_device_only_refuses_to_be_a_rank(
    bare: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plugins.hash.runner.HashRunner.takes_ranks", ModelRunner.takes_ranks)
    request = LoadModelRequest(parallel=place(1, 2, rendezvous="tcp://127.0.0.1:1", address="127.0.0.1:2"))
    error = await refusal(all_answers(bare.execution.LoadModel(request)))
    assert (error.field, error.reason) == ("parallel", "TAKES_NO_RANKS")
    assert "rank 1 of 2" in error.message


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, TlsConfig]:
    """The worker's own, another worker's, a scheduler's."""
    pki = Pki(tmp_path)
    return {
        "own": pki.good(Role.WORKER, WORKER),
        "other": pki.good(Role.WORKER, "worker-2"),
        "scheduler": pki.good(Role.SCHEDULER, "s"),
    }


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"rank": 2}, "rank"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
        ({"step_timeout": Duration()}, "parallel.step_timeout"),
        ({"rendezvous": "nowhere"}, "rendezvous"),
    ],
)
async def test_a_place_that_cannot_be_is_refused_by_field(
    bare: Harness, wrong: dict[str, Any], field: str
) -> None:
    given = place(0, 2, rendezvous="tcp://127.0.0.1:1", address="127.0.0.1:2")
    kept = {each.name: getattr(given, each.name) for each in given.DESCRIPTOR.fields}
    request = LoadModelRequest(parallel=ParallelPlace(**{**kept, **wrong}))
    error = await refusal(all_answers(bare.execution.LoadModel(request)))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_under_tls_the_leader_is_let_in_by_its_workers_certificate(
    certificates: dict[str, TlsConfig],
) -> None:
    async with served(2, tls=certificates["own"]) as ranks:
        loaded = await load(ranks)
        scheduler = open_channel(
            ranks[0].address, traced=False, tls=certificates["scheduler"], role=Role.WORKER, name=WORKER
        )
        driver = await Harness(scheduler, ExecutionServiceStub(scheduler)).drive()
        await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [5])])
        await driver.step(decode=True)
        assert driver.tokens[0] == continue_tokens([5], 2, VOCAB)
        driver.call.cancel()
        await scheduler.close()
        stranger = open_channel(
            ranks[1].address,
            traced=False,
            tls=certificates["other"],
            role=Role.WORKER,
            name=WORKER,
        )
        error = await refusal(all_answers(ExecutionServiceStub(stranger).Follow(iter([FollowRequest()]))))
        assert error.code is grpc.StatusCode.PERMISSION_DENIED
        await stranger.close()
    assert len(loaded.allocated) == 2


async def all_answers(call: object) -> list[object]:
    return [answer async for answer in call]  # type: ignore[attr-defined]


async def refusal(call: object) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return from_rpc_error(caught.value)
