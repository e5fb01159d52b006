"""The executors of one replica: one, or the ranks of this host that run a model together. They live and end
together.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from meshkit.errors import MeshError
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role
from meshkit.telemetry.logging import get_logger
from worker_svc.config import WorkerConfig
from worker_svc.executor.settings import ExecutorSettings
from worker_svc.executor_process import ExecutorProcess, spawn_executor

log = get_logger(__name__)

SPIN_COUNT = 5000
"""Turns that a thread of GNU OpenMP waits for work by spinning, before it sleeps (some tens of microseconds).
libgomp's own choice is milliseconds; where two executors share processors, as in a swap, the waiting of one
then is time that the other does not get. See docs/performance.md, "Threads that wait".
"""
_DEAD_GRACE_S = 0.1


@dataclass(slots=True)
class Rank:
    """One executor's process and the way to it. label: for people, as "rank 1 (device 3)"."""

    number: int
    device: int
    label: str
    process: ExecutorProcess
    channel: grpc.aio.Channel

    async def wait(self) -> str:
        """Return when its process has ended: who and how, for people."""
        return f"{self.label} {await self.process.wait()}"

    async def stop(self, *, timeout_s: float) -> None:
        """Close the channel and end the process, by force after `timeout_s` seconds."""
        await self.channel.close()
        await self.process.stop(timeout_s=timeout_s if self.process.alive else _DEAD_GRACE_S)


@dataclass(slots=True)
class ExecutorSet:
    """All executors of a replica on this host, in the order of their ranks; one where it is alone."""

    ranks: Sequence[Rank]

    def __repr__(self) -> str:
        return f"<ExecutorSet {[rank.label for rank in self.ranks]}>"

    @property
    def first(self) -> Rank:
        """The first rank here: the leader, where this host has rank 0."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        """Whether the scheduler's streams come here."""
        return self.first.number == 0

    @property
    def alive(self) -> bool:
        """False once the end of one of them was noticed."""
        return all(rank.process.alive for rank in self.ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.process.pid for rank in self.ranks]

    async def wait(self) -> str:
        """Return when one of them has ended: which and how, for people."""
        deaths = [asyncio.create_task(rank.wait(), name=f"{rank.label} death") for rank in self.ranks]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(sorted(death.result() for death in done))
        finally:
            for death in deaths:
                death.cancel()
            await asyncio.gather(*deaths, return_exceptions=True)

    async def stop(self, *, timeout_s: float) -> None:
        """End all of them, at once; by force after `timeout_s` seconds."""
        await asyncio.gather(*(rank.stop(timeout_s=timeout_s) for rank in self.ranks))


async def spawn_set(config: WorkerConfig, *, instance_id: str) -> ExecutorSet:
    """Start an executor for each of this host's ranks, and wait until all serve. instance_id: of the first.

    Raises:
        MeshError: as `spawn_executor`, of the first that failed; the others were ended.
    """
    spawning = [
        asyncio.create_task(_spawn(config, number, device, instance_id=own_id))
        for number, device, own_id in _places(config, instance_id)
    ]
    try:
        return ExecutorSet(await asyncio.gather(*spawning))
    except BaseException:
        for task in spawning:
            task.cancel()
        ranks = await asyncio.gather(*spawning, return_exceptions=True)
        limit_s = config.executor.stop_timeout_s
        await asyncio.gather(*(rank.stop(timeout_s=limit_s) for rank in ranks if isinstance(rank, Rank)))
        raise


def _places(config: WorkerConfig, instance_id: str) -> list[tuple[int, int, str]]:
    """(rank, device, instance id) of each rank here. The scheduler knows the first one's id only."""
    first = config.first_rank
    return [
        (number, device, instance_id if number == first else f"{instance_id}-rank{number}")
        for number, device in enumerate(config.own_devices, start=first)
    ]


async def _spawn(config: WorkerConfig, number: int, device: int, *, instance_id: str) -> Rank:
    label = label_of(config, number, device)
    settings = _settings(config, number, device, instance_id=instance_id)
    try:
        process = await spawn_executor(
            settings,
            python=config.executor.python,
            environment=executor_environment(config),
            timeout_s=config.executor.start_timeout_s,
        )
    except MeshError as error:
        if config.is_set:
            error.message = f"{label}: {error.message}"
        raise
    log.info("executor started", who=label, pid=process.pid, address=process.address,
             instance_id=process.instance_id)  # fmt: skip
    channel = open_channel(
        process.address, traced=False, tls=config.tls, role=Role.WORKER, name=config.worker_id
    )
    return Rank(number, device, label, process, channel)


def label_of(config: WorkerConfig, number: int, device: int) -> str:
    """How people are told of a rank."""
    return f"rank {number} (device {device})" if config.is_set else "executor"


def _settings(config: WorkerConfig, number: int, device: int, *, instance_id: str) -> ExecutorSettings:
    place = {"chipmesh.rank": str(number)} if config.is_set else {}
    return ExecutorSettings(
        backend=config.backend,
        backend_options=config.backend_options,
        instance_id=instance_id,
        device=device,
        listen=config.executor.listen,
        cache_dir=config.cache_dir,
        tracing=config.tracing,
        log_level=config.log_level,
        reflection=config.reflection,
        hung_after_s=config.executor.hung_after_s,
        span_attributes={
            "chipmesh.worker": config.worker_id,
            "chipmesh.group": config.group,
            "chipmesh.model": config.model,
            **place,
        },
        tls=config.tls,
        worker=config.worker_id,
    )


def executor_environment(config: WorkerConfig) -> Mapping[str, str]:
    """What is set before an executor's interpreter starts: runtimes read thread counts and
    visibility once.
    """
    chosen = {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    threads = _threads(config)
    if threads is not None:
        chosen["OMP_NUM_THREADS"] = str(threads)
    return {**chosen, **config.executor.environment}


def _threads(config: WorkerConfig) -> int | None:
    """As configured, else a fair share: executors that each take all processors slow each other down
    several times over. None: the only one on its host takes what its libraries think right.
    """
    sharing = config.executors_here
    if config.executor.threads is not None or sharing == 1:
        return config.executor.threads
    return max(1, len(os.sched_getaffinity(0)) // sharing)
