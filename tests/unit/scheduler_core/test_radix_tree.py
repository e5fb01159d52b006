from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.errors import IdentityViolated
from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.radix_tree import PrefixMatch, RadixTree
from scheduler_svc.core.token_key import Namespace, common_bytes, token_key


def insert(
    tree: RadixTree[str], tokens: Sequence[int], pages: Sequence[int], *, salt: str = "", priority: int = 0
) -> tuple[int, Node]:
    return tree.insert(token_key(tokens), pages, space=Namespace(salt), priority=priority)


def lock(tree: RadixTree[str], tokens: Sequence[int]) -> Node:
    node = tree.lock(tree.match(token_key(tokens)))
    assert node is not None
    return node


def use(tree: RadixTree[str], tokens: Sequence[int], *, priority: int = 0) -> None:
    """As a request does that is admitted and ends."""
    node = tree.lock(tree.match(token_key(tokens)), priority=priority)
    if node is not None:
        tree.unlock(node)


def cached_pages(tree: RadixTree[str], tokens: Sequence[int], *, salt: str = "") -> list[int]:
    """Page ids of the longest prefix, through a lock that is given up at once."""
    node = tree.lock(tree.match(token_key(tokens), space=Namespace(salt)))
    if node is None:
        return []
    pages: list[int] = tree.pages_to(node).tolist()
    tree.unlock(node)
    return pages


def test_only_whole_pages_are_matched() -> None:
    tree: RadixTree[str] = RadixTree(page_size=4)
    insert(tree, range(12), [7, 8, 9])
    assert cached_pages(tree, range(12)) == [7, 8, 9]
    assert cached_pages(tree, range(11)) == [7, 8]
    assert cached_pages(tree, [*range(6), 99, 98, 97]) == [7]
    assert cached_pages(tree, [0, 1, 2]) == []


def test_a_limit_bounds_the_match_in_pages() -> None:
    tree: RadixTree[str] = RadixTree(page_size=2)
    insert(tree, range(8), [1, 2, 3, 4])
    assert tree.match(token_key(range(8)), limit=3).depth == 3
    assert tree.match(token_key(range(8)), limit=0).node is None


def test_two_continuations_of_one_prefix_share_its_pages() -> None:
    tree: RadixTree[str] = RadixTree(page_size=2)
    insert(tree, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    known, _ = insert(tree, [1, 2, 3, 4, 8, 9], [10, 11, 12])
    assert known == 2
    assert cached_pages(tree, [1, 2, 3, 4, 5, 6]) == [0, 1, 2]
    assert cached_pages(tree, [1, 2, 3, 4, 8, 9]) == [0, 1, 12]
    assert tree.page_count == 4


def test_a_page_that_differs_in_its_second_token_is_another_page() -> None:
    tree: RadixTree[str] = RadixTree(page_size=2)
    insert(tree, [1, 2, 3, 4], [0, 1])
    insert(tree, [1, 2, 3, 5], [8, 9])
    assert cached_pages(tree, [1, 2, 3, 4]) == [0, 1]
    assert cached_pages(tree, [1, 2, 3, 5]) == [0, 9]


def test_inserting_what_is_there_says_so_and_adds_nothing() -> None:
    tree: RadixTree[str] = RadixTree(page_size=2)
    insert(tree, range(6), [0, 1, 2])
    known, node = insert(tree, range(4), [5, 6])
    assert (known, node.end, tree.page_count) == (2, 2, 3)


def test_salts_share_nothing() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2], [0, 1], salt="a")
    insert(tree, [1, 2], [2, 3], salt="b")
    assert cached_pages(tree, [1, 2], salt="a") == [0, 1]
    assert cached_pages(tree, [1, 2], salt="b") == [2, 3]
    assert cached_pages(tree, [1, 2]) == []


def test_eviction_takes_the_least_recently_used_prefix_first_and_its_tail_before_its_head() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2, 3], [0, 1, 2])
    insert(tree, [7, 8, 9], [3, 4, 5])
    use(tree, [1, 2, 3])
    assert tree.evict(2).tolist() == [4, 5]
    assert cached_pages(tree, [7, 8, 9]) == [3]


def test_a_look_that_is_no_use_does_not_save_a_prefix_from_eviction() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1], [0])
    insert(tree, [2], [1])
    tree.match(token_key([1]))
    assert tree.evict(1).tolist() == [0]


def test_a_prefix_that_another_request_computed_again_was_used_again() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2], [0, 1])
    insert(tree, [7, 8], [3, 4])
    insert(tree, [1, 2], [5, 6])
    assert sorted(tree.evict(2).tolist()) == [3, 4]


def test_a_shared_prefix_outlives_its_continuations() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2, 3], [0, 1, 2])
    insert(tree, [1, 2, 4], [0, 1, 3])
    assert sorted(tree.evict(2).tolist()) == [2, 3]
    assert cached_pages(tree, [1, 2]) == [0, 1]
    assert sorted(tree.evict(5).tolist()) == [0, 1]
    assert tree.page_count == tree.evictable_count == 0


def test_locked_pages_and_those_before_them_are_never_evicted() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2, 3, 4], [0, 1, 2, 3])
    node = tree.lock(tree.match(token_key([1, 2])))
    assert node is not None
    assert sorted(tree.clear().tolist()) == [2, 3]
    assert not tree.evict(1)
    tree.unlock(node)
    assert sorted(tree.clear().tolist()) == [0, 1]


def test_a_lock_stays_where_it_was_when_its_node_is_split() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2, 3], [0, 1, 2])
    node = lock(tree, [1, 2, 3])
    insert(tree, [1, 9], [0, 7])
    tree.check([node])
    assert tree.pages_to(node).tolist() == [0, 1, 2]
    assert tree.clear().tolist() == [7]


def test_it_is_known_how_many_pages_one_unlock_would_free() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2, 3], [0, 1, 2])
    left = lock(tree, [1, 2, 3])
    assert tree.pinned_only_by(left) == 3
    insert(tree, [1, 7], [0, 9])
    right = lock(tree, [1, 7])
    assert (tree.pinned_only_by(left), tree.pinned_only_by(right)) == (2, 1)
    before = tree.evictable_count
    tree.unlock(left)
    assert tree.evictable_count == before + 2


def test_many_small_evictions_do_not_look_at_every_leaf() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    leaves = 2000
    for leaf in range(leaves):
        insert(tree, [leaf, leaf, leaf], [3 * leaf, 3 * leaf + 1, 3 * leaf + 2])
    before = tree._leaves.pushes
    for _ in range(300):
        tree.evict(1)
    assert tree._leaves.pushes - before <= 300


def test_a_match_holds_until_the_cache_changes_where_it_ends() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    key = token_key([1, 2, 3, 4])
    nothing = tree.match(key)
    insert(tree, [8], [9])
    assert tree.still_holds(nothing, key)
    insert(tree, [1, 2], [0, 1])
    assert not tree.still_holds(nothing, key)
    half = tree.match(key)
    insert(tree, [1, 2, 7], [0, 1, 2])
    assert tree.still_holds(half, key)
    insert(tree, [1, 2, 3], [0, 1, 3])
    assert not tree.still_holds(half, key)
    longer = tree.match(key)
    tree.clear()
    assert not tree.still_holds(longer, key)


def test_a_watcher_is_told_of_each_change_at_the_end_of_its_match_and_of_no_other() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
    key = token_key([1, 2, 3, 9])

    def told() -> bool:
        stale = tree.take_stale() == ["w"]
        tree.watch("w", tree.match(key), key)
        return stale

    tree.watch("w", tree.match(key), key)
    insert(tree, [7, 8], [5, 6])
    assert tree.evict(1).tolist() == [4]
    assert not told()
    assert tree.evict(1).tolist() == [3]  # The match ends with its node now, so something may follow it.
    assert told()
    insert(tree, [1, 2, 3, 4], [0, 1, 2, 3])
    assert not told()
    insert(tree, [1, 2, 3, 9], [0, 1, 2, 9])
    assert told()
    tree.clear()
    assert told()


def test_a_forgotten_lock_is_found_by_the_check() -> None:
    tree: RadixTree[str] = RadixTree(page_size=1)
    insert(tree, [1], [0])
    lock(tree, [1])
    with pytest.raises(IdentityViolated, match="should have 0 locks"):
        tree.check([])


def test_a_key_that_does_not_fit_its_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes of key for 1 pages of 4 bytes"):
        insert(RadixTree[str](page_size=1), [1, 2], [0])


def test_common_bytes_counts_whole_tokens() -> None:
    assert common_bytes(token_key([1, 2, 3]), token_key([1, 2, 259])) == 8
    assert common_bytes(token_key([5, 1, 2]), token_key([1, 2]), a_start=4) == 8
    assert common_bytes(b"", token_key([1])) == 0


class RadixTreeMachine(RuleBasedStateMachine):
    """Against a plain model: the set of all cached prefixes, each with the page that its last page is in."""

    SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=9)

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree: RadixTree[str] = RadixTree(page_size=page_size)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locks: list[tuple[Node, str, tuple[int, ...]]] = []
        self.next_page = 0
        self.watched: dict[str, tuple[list[int], PrefixMatch]] = {}

    def known_pages(self, tokens: Sequence[int], salt: str) -> list[int]:
        pages = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.model.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    @rule(tokens=SEQUENCES, salt=st.sampled_from("ab"))
    def insert(self, tokens: list[int], salt: str) -> None:
        count = len(tokens) // self.page_size
        if not count:
            return
        tokens = tokens[: count * self.page_size]
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        before = len(self.known_pages(tokens, salt))
        known, node = self.tree.insert(token_key(tokens), pages, space=Namespace(salt))
        assert known == before
        for index in range(known, count):
            self.model[salt, tuple(tokens[: (index + 1) * self.page_size])] = pages[index]
        assert self.tree.pages_to(node).tolist() == self.known_pages(tokens, salt)

    @rule(tokens=SEQUENCES, salt=st.sampled_from("ab"))
    def lock(self, tokens: list[int], salt: str) -> None:
        match = self.tree.match(token_key(tokens), space=Namespace(salt))
        assert match.depth == len(self.known_pages(tokens, salt))
        node = self.tree.lock(match)
        assert (node is None) == (match.depth == 0)
        if node is not None:
            self.locks.append((node, salt, tuple(tokens[: match.depth * self.page_size])))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.tree.unlock(node)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        expected = min(count, self.tree.evictable_count)
        gone = set(self.tree.evict(count).tolist())
        assert len(gone) == expected
        self.model = {prefix: page for prefix, page in self.model.items() if page not in gone}

    @rule(tokens=SEQUENCES, salt=st.sampled_from("ab"))
    def watch(self, tokens: list[int], salt: str) -> None:
        name = f"{salt} {tokens}"
        match = self.tree.match(token_key(tokens), space=Namespace(salt))
        self.tree.watch(name, match, token_key(tokens))
        self.watched[name] = (tokens, match)

    @rule()
    def take_stale(self) -> None:
        for name in self.tree.take_stale():
            del self.watched[name]

    @invariant()
    def a_match_of_which_nothing_was_told_still_holds(self) -> None:
        if not hasattr(self, "tree"):
            return
        for name, (tokens, match) in self.watched.items():
            if name not in self.tree._watch._stale:
                found = self.tree.match(token_key(tokens), space=match.space)
                assert (found.node, found.depth) == (match.node, match.depth)

    @invariant()
    def tree_and_model_agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check(node for node, _, _ in self.locks)
        assert self.tree.page_count == len(self.model)
        pinned = set()
        for node, salt, tokens in self.locks:
            pages = self.known_pages(tokens, salt)
            assert self.tree.pages_to(node).tolist() == pages, "a locked prefix changed"
            assert len(pages) * self.page_size == len(tokens), "a locked page was evicted"
            pinned.update(pages)
        assert self.tree.evictable_count == len(self.model) - len(pinned)
        for salt, tokens in self.model:
            assert tokens[: -self.page_size] == () or (salt, tokens[: -self.page_size]) in self.model


RadixTreeMachine.TestCase.settings = settings(max_examples=max(150, settings().max_examples // 5))
TestRadixTreeMachine = RadixTreeMachine.TestCase
