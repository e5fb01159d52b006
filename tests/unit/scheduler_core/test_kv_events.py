from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.core.errors import FellBehind
from scheduler_svc.core.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEventLog
from scheduler_svc.core.radix_tree import RadixTree
from scheduler_svc.core.token_key import Namespace, token_key
from tests.unit.scheduler_core.block_reader import BlockReader
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request


def recorded(page_size: int = 2) -> tuple[RadixTree[str], KvEventLog]:
    tree, log = RadixTree[str](page_size=page_size), KvEventLog(page_size=page_size)
    tree.record_events(log)
    return tree, log


def prefixes_of(tree: RadixTree[str], page_size: int) -> set[tuple[int, ...]]:
    found = set()
    for node in tree.nodes():
        key, above = node.key, node.parent
        while above is not None:
            key, above = above.key + key, above.parent
        tokens = tuple(memoryview(key).cast("I"))
        found |= {tokens[: end * page_size] for end in range(node.start + 1, node.end + 1)}
    return found


def test_a_stored_sequence_is_told_as_a_chain_of_blocks() -> None:
    tree, log = recorded()
    tree.insert(token_key([1, 2, 3, 4]), [0, 1])
    tree.insert(token_key([1, 2, 3, 4, 5, 6]), [0, 1, 2])
    first, second = log.read(after_seq=0)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.parent_block_hash, first.token_ids, first.block_size) == (None, [1, 2, 3, 4], 2)
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[-1], [5, 6])


def test_equal_prefixes_have_equal_hashes_on_every_replica_and_others_never() -> None:
    def hashes(tokens: list[int], space: Namespace) -> tuple[int, ...]:
        tree, log = recorded()
        tree.insert(token_key(tokens), list(range(len(tokens) // 2)), space=space)
        (event,) = log.read(after_seq=0)
        assert isinstance(event, BlocksStored)
        return event.block_hashes

    plain = hashes([1, 2, 3, 4], Namespace())
    assert plain == hashes([1, 2, 3, 4], Namespace())
    assert plain[0] == hashes([1, 2, 5, 6], Namespace())[0]
    others = [
        hashes([1, 2, 3, 4], space)[0]
        for space in (Namespace("ab"), Namespace("a", "b"), Namespace("", "ab"), Namespace("b", "a"))
    ]
    assert len({plain[0], *others}) == 5


def test_a_sequence_has_the_same_hashes_whether_it_came_in_one_piece_or_in_several() -> None:
    chains = []
    for pieces in ([8], [4, 8], [2, 6, 8]):
        tree, log = recorded()
        for end in pieces:
            tree.insert(token_key(range(end)), list(range(end // 2)))
        stored = [event for event in log.read(after_seq=0) if isinstance(event, BlocksStored)]
        chains.append([block_hash for event in stored for block_hash in event.block_hashes])
    assert chains[0] == chains[1] == chains[2]
    assert len(set(chains[0])) == 4


def test_after_a_split_the_snapshot_has_both_halves_with_their_own_hashes() -> None:
    tree, log = recorded()
    tree.insert(token_key([1, 2, 3, 4, 5, 6]), [0, 1, 2])
    tree.insert(token_key([1, 2, 7, 8]), [0, 3])
    reader, fresh = BlockReader(), BlockReader()
    reader.take(log.read(after_seq=0))
    snapshot = tree.kv_snapshot()
    assert snapshot is not None
    for event in snapshot.stored:
        fresh.store(event)
    assert fresh.blocks == reader.blocks


def test_a_split_changes_no_block_and_tells_nothing() -> None:
    tree, log = recorded()
    tree.insert(token_key([1, 2, 3, 4]), [0, 1])
    tree.lock(tree.match(token_key([1, 2])))
    assert log.last_seq == 1
    tree.insert(token_key([1, 2, 7, 8]), [0, 2])
    first, second = log.read(after_seq=0)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert second.parent_block_hash == first.block_hashes[0]


def test_a_flush_of_everything_is_one_event_and_a_flush_of_a_part_names_the_blocks() -> None:
    tree, log = recorded()
    tree.insert(token_key([1, 2, 3, 4]), [0, 1])
    tree.insert(token_key([5, 6]), [2])
    node = tree.lock(tree.match(token_key([1, 2])))
    assert node is not None
    tree.clear()
    assert all(isinstance(event, BlocksRemoved) for event in log.read(after_seq=2))
    tree.unlock(node)
    before = log.last_seq
    tree.clear()
    assert log.read(after_seq=before) == [AllBlocksCleared(before + 1)]


def test_a_reader_that_fell_behind_is_told_takes_a_snapshot_and_goes_on() -> None:
    tree = RadixTree[str](page_size=2)
    log = KvEventLog(page_size=2, capacity=12)
    tree.record_events(log)
    reader = BlockReader()
    for start in range(0, 40, 4):
        tree.insert(token_key(range(start, start + 4)), [start, start + 1])
    tree.evict(3)
    with pytest.raises(FellBehind, match="after 0 are wanted, but 10 to 12 are kept; take a snapshot"):
        log.read(after_seq=reader.seq)
    snapshot = tree.kv_snapshot()
    assert snapshot is not None
    reader.seq = snapshot.seq
    for event in snapshot.stored:
        reader.store(event)
    tree.insert(token_key([90, 91]), [77])
    reader.take(log.read(after_seq=reader.seq))
    assert reader.sequences() == prefixes_of(tree, 2)


def test_a_reader_that_knows_more_than_there_was_is_another_replicas() -> None:
    _, log = recorded()
    with pytest.raises(FellBehind):
        log.read(after_seq=3)


def test_a_reader_can_ask_for_a_few_at_a_time() -> None:
    tree, log = recorded()
    for number in range(5):
        tree.insert(token_key([number, number]), [number])
    assert [event.seq for event in log.read(after_seq=1, limit=2)] == [2, 3]
    assert log.read(after_seq=5) == []


def test_a_log_that_comes_late_is_told_what_is_cached_already() -> None:
    drive = Drive(make_limits())
    drive.add(make_request(range(20), 4))
    drive.finish()
    assert drive.batcher.kv_events is None
    assert drive.batcher.kv_snapshot() is None
    log = drive.batcher.record_kv_events()
    assert drive.batcher.record_kv_events() is log
    reader = BlockReader()
    reader.take(log.read(after_seq=0))
    assert tuple(range(20)) in reader.sequences()


def test_a_tree_without_a_log_computes_no_hash() -> None:
    drive = Drive(make_limits())
    drive.add(make_request(range(20), 4))
    drive.finish()
    assert all(not node.block_hashes for node in drive.batcher._pool.tree.nodes())


def test_a_lost_replica_tells_that_its_cache_is_gone() -> None:
    drive = Drive(make_limits(enable_kv_events=True))
    drive.add(make_request(range(20), 4), make_request(range(30, 50), 4))
    drive.run(until=lambda: drive.batcher.pages.cached > 0)
    drive.batcher.lose()
    log = drive.batcher.kv_events
    assert log is not None
    assert log.read(after_seq=log.last_seq - 1) == [AllBlocksCleared(log.last_seq)]


@settings(max_examples=max(300, settings().max_examples))
@given(
    page_size=st.integers(1, 3),
    moves=st.lists(
        st.one_of(
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.lists(st.integers(0, 1), min_size=6, max_size=9),
            st.integers(0, 6),
            st.sampled_from(["clear", "read"]),
        ),
        max_size=30,
    ),
)  # fmt: skip
def test_who_reads_the_events_knows_what_the_tree_holds(
    page_size: int, moves: list[list[int] | int | str]
) -> None:
    tree, log = recorded(page_size)
    reader = BlockReader()
    for move in moves:
        if isinstance(move, list):
            count = len(move) // page_size
            if count:
                tree.insert(token_key(move[: count * page_size]), list(range(count)))
        elif isinstance(move, int):
            tree.evict(move)
        elif move == "clear":
            tree.clear()
        else:
            reader.take(log.read(after_seq=reader.seq))
            assert reader.sequences() == prefixes_of(tree, page_size)
    reader.take(log.read(after_seq=reader.seq))
    snapshot = tree.kv_snapshot()
    assert snapshot is not None
    fresh = BlockReader()
    for event in snapshot.stored:
        fresh.store(event)
    assert fresh.blocks == reader.blocks
    assert reader.sequences() == prefixes_of(tree, page_size)
