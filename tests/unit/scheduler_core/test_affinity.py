"""Placement remembers where prefixes went, the longest and the newest first, and forgets in bounds."""

from __future__ import annotations

from dataclasses import replace

from scheduler_svc.core.affinity import DEPTHS, Affinity
from scheduler_svc.core.sessions import Sessions
from scheduler_svc.core.structures import ReplicaId, Request
from scheduler_svc.core.token_key import token_key
from tests.unit.scheduler_core.simulated_executor import make_request

A, B, C = (ReplicaId(name) for name in "abc")


def of_session(name: str) -> Request:
    return replace(make_request([1]), session=name)


def key(*runs: tuple[int, int]) -> bytes:
    """Runs of (token, count)."""
    return token_key([token for token, count in runs for _ in range(count)])


def test_the_replica_of_the_longest_prefix_comes_first() -> None:
    affinity = Affinity()
    affinity.remember(key((1, 16), (2, 200)), salt="", replica=A)
    affinity.remember(key((1, 16), (3, 200)), salt="", replica=B)
    assert list(affinity.candidates(key((1, 16), (2, 130)), salt="")) == [A, B]
    assert list(affinity.candidates(key((1, 16), (9, 9)), salt="")) == [B, A]
    assert list(affinity.candidates(key((7, 400)), salt="")) == []


def test_a_salt_shares_nothing_and_a_short_prompt_has_no_prefix() -> None:
    affinity = Affinity()
    affinity.remember(key((1, 64)), salt="tenant", replica=A)
    assert list(affinity.candidates(key((1, 64)), salt="")) == []
    assert list(affinity.candidates(key((1, 64)), salt="tenant")) == [A]
    affinity.remember(key((1, DEPTHS[-1] - 1)), salt="", replica=A)
    assert list(affinity.candidates(key((1, 64)), salt="")) == []


def test_a_replica_that_is_gone_is_named_no_more() -> None:
    affinity = Affinity()
    for replica in (A, B):
        affinity.remember(key((1, 16)), salt="", replica=replica)
    affinity.forget(B)
    assert list(affinity.candidates(key((1, 16)), salt="")) == [A]


def test_prefixes_used_longest_ago_are_forgotten_first() -> None:
    affinity = Affinity(capacity=2)
    for token, replica in ((1, A), (2, B), (1, A), (3, C)):
        affinity.remember(key((token, 16)), salt="", replica=replica)
    found = {token: list(affinity.candidates(key((token, 16)), salt="")) for token in (1, 2, 3)}
    assert found == {1: [A], 2: [], 3: [C]}


def test_a_session_stays_with_its_group_and_another_model_has_its_own() -> None:
    sessions = Sessions(capacity=2)
    first = of_session("a")
    assert sessions.group_of(first) == ""
    first.group = "g"
    sessions.remember(first)
    assert sessions.group_of(of_session("a")) == "g"
    assert sessions.group_of(of_session("")) == ""
    for name in ("b", "c"):
        other = of_session(name)
        other.group = "h"
        sessions.remember(other)
    assert sessions.group_of(of_session("a")) == "", "the oldest of three is forgotten"
