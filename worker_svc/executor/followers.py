"""The leader's streams to the other ranks of its set: what it runs, they run too, in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import grpc.aio

from chipmesh.device.v1alpha1.execution_pb2 import (
    ExecuteStepsRequest,
    FollowAttach,
    FollowRequest,
    FollowResponse,
    RankInfo,
)
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from meshkit.errors import Internal, MeshError, Unavailable, from_rpc_error
from meshkit.telemetry.logging import get_logger
from worker_svc.device_thread import DeviceThread
from worker_svc.step_engine import StepEngine

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceAsyncStub

log = get_logger(__name__)

OpenChannel = Callable[[str], grpc.aio.Channel]
OnLost = Callable[[MeshError], None]


class Followers:
    """One stream to each other rank, opened at the first attach and kept for the life of the set. Alone there
    are none.

    Nothing here waits: a message is queued for the ranks, and goes out beside the leader's own step.

    on_lost: told of each stream that ends, by an error that names the rank: the set is over then.
    """

    def __init__(
        self, engine: StepEngine, device: DeviceThread, *, open_channel: OpenChannel, on_lost: OnLost
    ) -> None:
        self._engine = engine
        self._device = device
        self._open_channel = open_channel
        self._on_lost = on_lost
        self._followers: list[_Follower] = []
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Followers {len(self._followers)}>"

    def __len__(self) -> int:
        return len(self._followers)

    def attach(self, epoch: int) -> None:
        """A scheduler attaches; the leader's own attach must be queued on its device before anything else."""
        if not self._followers:
            self._open()
        self._send(FollowRequest(attach=FollowAttach(epoch=epoch)))

    def hand_on(self, steps: ExecuteStepsRequest) -> None:
        """Plans as they came; the leader's own turn at them must be queued before anything else."""
        if self._followers:
            self._send(FollowRequest(steps=steps))

    async def close(self) -> None:
        """End the streams, and with them the set. Idempotent."""
        tasks, self._tasks, self._followers = self._tasks, [], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self) -> None:
        for rank in self._engine.ranks[1:]:
            follower = _Follower(rank, self._open_channel(rank.address), self._check)
            self._followers.append(follower)
            self._tasks.append(asyncio.create_task(self._follow(follower), name=f"rank {rank.rank}"))

    def _send(self, request: FollowRequest) -> None:
        for follower in self._followers:
            follower.messages.put_nowait(request)

    async def _follow(self, follower: _Follower) -> None:
        self._on_lost(await follower.run())

    async def _check(self, response: FollowResponse) -> str:
        """What parts a rank from its leader, by its answer; "" where nothing does.

        Both refuse what is wrong with a plan; an error of one alone would leave them at different steps.
        """
        if not response.error:
            return ""
        await self._device.submit(lambda: None)  # Our own turn at the message is over then.
        if response.epoch != self._engine.epoch:
            return ""  # A new epoch has dropped all that they could differ by.
        if self._engine.has_refused(response.epoch, response.step_seq):
            return ""
        return (
            f"step {response.step_seq} of epoch {response.epoch} failed there and not here: {response.error}"
        )


class _Follower:
    """One other rank. messages: to be sent, in order. check: says what parts it from the leader, or ""."""

    def __init__(
        self,
        rank: RankInfo,
        channel: grpc.aio.Channel,
        check: Callable[[FollowResponse], Coroutine[Any, Any, str]],
    ) -> None:
        self._rank = rank
        self._channel = channel
        self._check = check
        self.messages: asyncio.Queue[FollowRequest] = asyncio.Queue()

    async def run(self) -> MeshError:
        """Send and read until the stream ends; the error names the rank and why."""
        try:
            cause = await self._exchange()
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error).message
        except MeshError as error:
            cause = error.message
        except Exception:
            log.exception("the stream to a rank failed", rank=self._rank.rank)
            return Internal(
                f"the stream to rank {self._rank.rank} failed by a fault of ours", reason="RANK_LOST"
            )
        finally:
            await self._channel.close()
        where = f"rank {self._rank.rank} at {self._rank.address}"
        return Unavailable(f"the set is over: {where} was lost: {cause}", reason="RANK_LOST")

    async def _exchange(self) -> str:
        stub: ExecutionServiceAsyncStub = ExecutionServiceStub(self._channel)
        async for response in stub.Follow(self._outgoing()):
            if problem := await self._check(response):
                return problem
        return "it ended its stream"

    async def _outgoing(self) -> AsyncIterator[FollowRequest]:
        while True:
            yield await self.messages.get()
