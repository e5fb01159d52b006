"""What a worker's prefix cache holds, as routers see it: a snapshot, then each change once and in order."""

from __future__ import annotations

from typing import Any

import grpc.aio

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.errors import MeshError, NotFound, Unavailable, from_rpc_error

PAGE = 4
PROMPT = list(range(10))


class Index:
    """A reader: the blocks that it believes to be cached."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.seq = 0

    def take(self, message: admin_pb2.SubscribeKvEventsResponse) -> None:
        if message.snapshot:
            self.blocks.clear()
        for event in message.events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                stored = event.stored
                assert len(stored.token_ids) == len(stored.block_hashes) * stored.block_size
                if stored.HasField("parent_block_hash"):
                    assert stored.parent_block_hash in self.blocks, "a block before its parent"
                for number, block in enumerate(stored.block_hashes):
                    tokens = stored.token_ids[number * stored.block_size : (number + 1) * stored.block_size]
                    self.blocks[block] = tuple(tokens)
            elif kind == "removed":
                for block in event.removed.block_hashes:
                    del self.blocks[block]
            else:
                self.blocks.clear()
        self.seq = message.seq


async def read_until(call: Any, index: Index, tokens: set[tuple[int, ...]]) -> None:
    """Read messages until the index holds exactly these blocks."""
    while set(index.blocks.values()) != tokens:
        index.take(await call.read())


def blocks_of(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + PAGE]) for start in range(0, len(tokens) // PAGE * PAGE, PAGE)}


async def test_a_reader_gets_what_is_cached_and_then_every_change(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0", page_size=PAGE)
        gateway = await m.gateway()
        first = await (await gateway.submit(PROMPT, 3)).end()
        call = m.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(worker="w0"))
        index = Index()
        message = await call.read()
        assert message.snapshot
        index.take(message)
        await read_until(call, index, blocks_of(PROMPT + first.tokens[:2]))
        second = await (await gateway.submit([7] * 9, 3)).end()
        both = blocks_of(PROMPT + first.tokens[:2]) | blocks_of([7] * 9 + second.tokens[:2])
        await read_until(call, index, both)
        await m.admin.FlushCache(admin_pb2.FlushCacheRequest())
        await read_until(call, index, set())
        call.cancel()


async def test_a_reader_that_comes_back_goes_on_where_it_was(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0", page_size=PAGE)
        gateway = await m.gateway()
        call = m.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(worker="w0"))
        index = Index()
        index.take(await call.read())
        call.cancel()
        seen = await (await gateway.submit(PROMPT, 3)).end()
        request = admin_pb2.SubscribeKvEventsRequest(worker="w0", after_seq=index.seq)
        again = m.admin.SubscribeKvEvents(request)
        message = await again.read()
        assert not message.snapshot
        index.take(message)
        await read_until(again, index, blocks_of(PROMPT + seen.tokens[:2]))
        again.cancel()


async def end_of(call: Any) -> MeshError:
    """How a stream ends."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it ended well")


async def test_an_unknown_worker_is_refused(mesh: Any) -> None:
    async with mesh() as m:
        call = m.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(worker="w0"))
        assert isinstance(await end_of(call), NotFound)


async def test_a_reader_is_told_when_the_cache_is_gone(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0", page_size=PAGE)
        call = m.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(worker="w0"))
        await call.read()
        await executor.stop()
        assert isinstance(await end_of(call), Unavailable)
