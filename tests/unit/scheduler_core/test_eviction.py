from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from scheduler_svc.core.errors import UnknownEvictionPolicy
from scheduler_svc.core.eviction import EVICTION_POLICIES, make_eviction_policy
from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.radix_tree import RadixTree
from scheduler_svc.core.token_key import token_key
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request

OLD, SHARED, URGENT, NEW = [1, 1], [2, 2], [3, 3], [4, 4]


def tree_of(policy: str) -> RadixTree[str]:
    return RadixTree(page_size=1, eviction=make_eviction_policy(policy))


def use(tree: RadixTree[str], tokens: list[int], *, priority: int = 0) -> None:
    node = tree.lock(tree.match(token_key(tokens)), priority=priority)
    assert node is not None
    tree.unlock(node)


def order_of_eviction(policy: str) -> list[list[int]]:
    """OLD is the oldest; SHARED was used three times, URGENT by a priority of 5; NEW is the newest."""
    tree = tree_of(policy)
    prefixes = [OLD, SHARED, URGENT, NEW]
    for number, tokens in enumerate(prefixes):
        priority = 5 if tokens is URGENT else 0
        tree.insert(token_key(tokens), [2 * number, 2 * number + 1], priority=priority)
        for _ in range(2 if tokens is SHARED else 0):
            use(tree, tokens)
    return [prefixes[tree.evict(2)[0] // 2] for _ in prefixes]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [OLD, SHARED, URGENT, NEW]),
        ("lfu", [OLD, URGENT, NEW, SHARED]),
        ("slru", [OLD, URGENT, NEW, SHARED]),
        ("priority", [OLD, SHARED, NEW, URGENT]),
    ],
)
def test_each_policy_gives_up_first_what_it_values_least(policy: str, order: list[list[int]]) -> None:
    assert order_of_eviction(policy) == order


def test_lfu_counts_on_where_slru_only_asks_whether_a_prefix_is_shared() -> None:
    for policy, gone in (("lfu", [9]), ("slru", [8])):
        tree = tree_of(policy)
        tree.insert(token_key([1]), [8])
        tree.insert(token_key([2]), [9])
        for _ in range(5):
            use(tree, [1])
        use(tree, [2])  # Twice with its maker's: protected, if used less often than the other, but later.
        assert tree.evict(1).tolist() == gone


def test_a_request_counts_once_however_often_what_it_computes_is_confirmed() -> None:
    drive = Drive(make_limits(page_size=1, chunk_tokens=3, eviction_policy="lfu"))
    drive.add(make_request(range(20), 4))
    drive.finish()
    assert {node.hits for node in drive.batcher._pool.tree.nodes()} == {1}
    drive.add(make_request([*range(20), 7], 1))
    drive.finish()
    hits = {node.end: node.hits for node in drive.batcher._pool.tree.nodes()}
    assert [hits[end] for end in sorted(hits)] == sorted(hits.values(), reverse=True)
    assert hits[20] == 2


def test_a_higher_priority_keeps_what_it_used_though_another_request_computed_it() -> None:
    drive = Drive(make_limits(page_count=12, page_size=1, eviction_policy="priority"))
    drive.add(make_request([1, 2, 3, 4], 1))
    drive.finish()
    drive.add(make_request([1, 2, 3, 5], 1, priority=3))
    drive.finish()
    for start in (10, 20, 30):
        drive.add(make_request(range(start, start + 7), 1))
        drive.finish()
    assert drive.batcher.matched_tokens(make_request([1, 2, 3, 9])) == 3


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_split_leaves_both_halves_what_was_so_and_only_the_used_half_is_used(policy: str) -> None:
    tree = tree_of(policy)
    tree.insert(token_key([1, 2, 3, 4]), [0, 1, 2, 3], priority=1)
    tree.insert(token_key([9, 9]), [8, 9], priority=1)
    use(tree, [1, 2], priority=2)
    halves = {node.end: node for node in tree.nodes() if node.pages[0] < 8}
    upper, lower = halves[2], halves[4]
    assert (upper.hits, upper.priority) == (2, 2)
    assert (lower.hits, lower.priority) == (1, 1)
    assert tree.evict(2).tolist() == [2, 3]  # The lower half is older than [9, 9].
    assert tree.evict(2).tolist() == [8, 9]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_small_evictions_look_at_few_entries_though_every_leaf_was_used_since_it_was_filed(
    policy: str,
) -> None:
    tree = tree_of(policy)
    leaves = 1000
    for leaf in range(leaves):
        tree.insert(token_key([leaf, leaf, leaf]), [3 * leaf, 3 * leaf + 1, 3 * leaf + 2])
    for leaf in range(leaves):
        use(tree, [leaf, leaf, leaf], priority=leaf % 3)
    before = tree._leaves.pushes
    for _ in range(300):
        tree.evict(1)
    assert tree._leaves.pushes - before <= leaves + 300  # Each use is put right once, whatever is evicted.
    before = tree._leaves.pushes
    for _ in range(300):
        tree.evict(1)
    assert tree._leaves.pushes - before <= 300


@given(
    policy=st.sampled_from(sorted(EVICTION_POLICIES)),
    uses=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=40),
    evictions=st.lists(st.integers(0, 40), max_size=5),
)
def test_what_is_evicted_is_always_a_leaf_of_lowest_rank(
    policy: str, uses: list[tuple[int, int]], evictions: list[int]
) -> None:
    """Ten leaves, used and evicted in any order: the queue finds what a look at all of them would find."""
    tree, ranks = tree_of(policy), make_eviction_policy(policy)
    for leaf in range(10):
        tree.insert(token_key([leaf]), [leaf])
    for step, (leaf, priority) in enumerate(uses):
        if tree.match(token_key([leaf])).depth:
            use(tree, [leaf], priority=priority)
        if step in evictions and tree.page_count:
            lowest: Node = min(tree.nodes(), key=ranks.rank)
            assert tree.evict(1).tolist() == [lowest.pages[0]]


def test_an_unknown_eviction_policy_is_refused_with_those_known() -> None:
    with pytest.raises(UnknownEvictionPolicy, match="'fifo' is unknown; known are: lfu, lru, priority, slru"):
        Drive(make_limits(eviction_policy="fifo"))
