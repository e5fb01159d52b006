"""The caches of several replicas as one: a reader that applies the events has what any replica has."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from chipmesh.scheduler.v1alpha1 import admin_pb2
from chipmesh.sglang_grpc import smg_common_pb2 as common
from gateway.sglang_grpc.cache_union import MOST_BLOCKS, CacheUnion

BLOCK = 2


class Reader:
    """Applies events as a router does; a block whose parent is not there, or a removal of nothing, fails."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}

    def apply(self, events: Iterable[common.KvCacheEvent]) -> None:
        for event in events:
            if event.WhichOneof("data") == "removed":
                for block_hash in event.removed.block_hashes:
                    del self.blocks[block_hash]
                continue
            stored = event.stored
            if stored.HasField("parent_block_hash"):
                assert stored.parent_block_hash in self.blocks, "a block without its parent"
            assert 0 < len(stored.blocks) <= MOST_BLOCKS
            for block in stored.blocks:
                assert block.block_hash not in self.blocks, "stored twice"
                assert block.block_size == len(block.token_ids) == BLOCK
                self.blocks[block.block_hash] = tuple(block.token_ids)


def tokens(block_hash: int) -> list[int]:
    return [block_hash % 1000, block_hash % 7]


def stored(*hashes: int, parent: int | None = None, salt: str = "") -> admin_pb2.KvEvent:
    event = admin_pb2.KvBlocksStored(
        block_hashes=hashes,
        token_ids=[token for each in hashes for token in tokens(each)],
        block_size=BLOCK,
        cache_salt=salt,
    )
    if parent is not None:
        event.parent_block_hash = parent
    return admin_pb2.KvEvent(stored=event)


def removed(*hashes: int) -> admin_pb2.KvEvent:
    return admin_pb2.KvEvent(removed=admin_pb2.KvBlocksRemoved(block_hashes=hashes))


def cleared() -> admin_pb2.KvEvent:
    return admin_pb2.KvEvent(cleared=admin_pb2.KvBlocksCleared())


def message(*events: admin_pb2.KvEvent, snapshot: bool = False) -> admin_pb2.SubscribeKvEventsResponse:
    return admin_pb2.SubscribeKvEventsResponse(snapshot=snapshot, events=events)


def read(union: CacheUnion, reader: Reader, replica: str, *events: admin_pb2.KvEvent) -> None:
    reader.apply(union.apply(replica, message(*events)))


def test_a_block_stays_while_any_replica_has_it() -> None:
    union, reader = CacheUnion(salt=""), Reader()
    for replica in "ab":
        read(union, reader, replica, stored(1, 2))
    read(union, reader, "a", removed(2, 1))
    assert set(reader.blocks) == {1, 2}
    read(union, reader, "b", removed(2))
    assert set(reader.blocks) == {1}
    reader.apply(union.drop("b"))
    assert not reader.blocks
    assert "0 blocks of 1 replicas" in repr(union)


def test_what_one_replica_has_already_is_only_the_parent_of_what_is_new() -> None:
    union, reader = CacheUnion(salt=""), Reader()
    read(union, reader, "a", stored(1, 2))
    events = list(union.apply("b", message(stored(1, 2, 3, 4))))
    assert [len(event.stored.blocks) for event in events] == [2]
    assert events[0].stored.parent_block_hash == 2
    reader.apply(events)
    assert set(reader.blocks) == {1, 2, 3, 4}


def test_a_new_snapshot_takes_back_only_what_it_lacks() -> None:
    union, reader = CacheUnion(salt=""), Reader()
    read(union, reader, "a", stored(1, 2, 3))
    events = list(union.apply("a", message(stored(1, 2), snapshot=True)))
    assert [list(event.removed.block_hashes) for event in events] == [[3]]
    reader.apply(events)
    read(union, reader, "a", cleared())
    assert not reader.blocks


def test_hashes_keep_their_64_bits_and_long_runs_are_cut() -> None:
    union, reader = CacheUnion(salt=""), Reader()
    hashes = [2**64 - 1 - index for index in range(2 * MOST_BLOCKS + 1)]
    read(union, reader, "a", stored(*hashes))
    assert set(reader.blocks) == {each - 2**64 for each in hashes}
    assert all(reader.blocks[each - 2**64] == tuple(tokens(each)) for each in hashes)


def test_prefixes_of_other_salts_and_adapters_are_not_shown() -> None:
    union, reader = CacheUnion(salt="mine"), Reader()
    foreign = stored(9, salt="mine")
    foreign.stored.adapter = "x"
    read(union, reader, "a", stored(1, salt="mine"), stored(2, salt="other"), stored(3), foreign)
    assert set(reader.blocks) == {1}
    read(union, reader, "a", removed(2, 3, 9))
    assert set(reader.blocks) == {1}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["store", "remove", "clear", "drop", "snapshot"]),
        st.integers(1, 6),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(operations=OPERATIONS)
def test_a_reader_has_the_union_whatever_happens(operations: list[tuple[str, str, int, int]]) -> None:
    union, reader = CacheUnion(salt=""), Reader()
    held: dict[str, dict[int, list[int]]] = {replica: {} for replica in "abc"}  # branch -> its chain
    for replica, operation, length, branch in operations:
        mine = held[replica]
        chain = [1000 * (branch + 1) + index for index in range(length)]
        if operation == "store" and len(mine.get(branch, [])) < length:
            have = len(mine.get(branch, []))
            parent = chain[have - 1] if have else None
            read(union, reader, replica, stored(*chain[have:], parent=parent))
            mine[branch] = chain
        elif operation == "remove" and mine.get(branch):
            read(union, reader, replica, removed(mine[branch].pop()))
        elif operation == "clear":
            read(union, reader, replica, cleared())
            mine.clear()
        elif operation == "drop":
            reader.apply(union.drop(replica))
            mine.clear()
        elif operation == "snapshot":
            mine[branch] = chain
            events = [stored(*each) for each in mine.values() if each]
            reader.apply(union.apply(replica, message(*events, snapshot=True)))
        expected = {block for mine in held.values() for chain in mine.values() for block in chain}
        assert set(reader.blocks) == expected
