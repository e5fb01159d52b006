"""The hash model's meeting of ranks: all hear all, and who is missing or lost is named to everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import pytest

from meshkit.errors import DeadlineExceeded, InvalidArgument, MeshError, Unavailable
from meshkit.ports import reserve_port
from plugins.hash.ranks import HashRanks
from plugins.sdk.runner import ParallelOptions

T = TypeVar("T")


def options(
    rank: int, count: int, rendezvous: str, *, join_s: float = 20, step_s: float = 20
) -> ParallelOptions:
    return ParallelOptions(
        rank=rank,
        tensor=count,
        pipeline=1,
        rendezvous=rendezvous,
        join_timeout_s=join_s,
        step_timeout_s=step_s,
    )


def on_all(works: Sequence[Callable[[], T]]) -> list[T | MeshError]:
    """What each gave or raised, all at once."""

    def one(work: Callable[[], T]) -> T | MeshError:
        try:
            return work()
        except MeshError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, works))


@contextmanager
def met(count: int, *, step_s: float = 20) -> Iterator[list[HashRanks]]:
    with reserve_port() as port, ExitStack() as stack:
        place = f"tcp://127.0.0.1:{port}"
        found = on_all(
            [partial(HashRanks, options(rank, count, place, step_s=step_s)) for rank in range(count)]
        )
        ranks = [each for each in found if isinstance(each, HashRanks)]
        for each in ranks:
            stack.callback(each.close)
        assert len(ranks) == count, found
        yield ranks


def test_every_rank_hears_what_each_said_by_rank() -> None:
    with met(3) as ranks:
        for turn in range(20):
            said = [f"{turn}/{rank}" for rank in range(3)]
            works = [partial(each.exchange, text) for each, text in zip(ranks, said, strict=True)]
            assert on_all(works) == [tuple(said)] * 3


def test_a_rank_that_does_not_come_is_named_to_all_who_did() -> None:
    with met(3, step_s=0.5) as ranks:
        found = on_all([lambda: ranks[0].exchange("a"), lambda: ranks[1].exchange("b")])
        for error in found:
            assert isinstance(error, DeadlineExceeded)
            assert (error.reason, "rank 2 did not come" in error.message) == ("RANKS_MISSING", True)


def test_a_rank_that_has_gone_is_named_to_the_others() -> None:
    with met(3) as ranks:
        ranks[1].close()
        found = on_all([lambda: ranks[0].exchange("a"), lambda: ranks[2].exchange("c")])
        for error in found:
            assert isinstance(error, Unavailable)
            assert (error.reason, "rank 1 was lost" in error.message) == ("RANK_LOST", True)


def test_those_who_never_came_are_named_when_the_time_to_join_is_over() -> None:
    with reserve_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        (leader,) = on_all([lambda: HashRanks(options(0, 3, place, join_s=0.3))])
        assert isinstance(leader, DeadlineExceeded)
        assert "rank 1, 2 did not come" in leader.message
        (other,) = on_all([lambda: HashRanks(options(1, 3, place, join_s=0.3))])
        assert isinstance(other, DeadlineExceeded)
        assert "rank 0 did not come" in other.message


def test_another_form_of_meeting_point_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="tcp://HOST:PORT"):
        HashRanks(options(0, 2, "file:///tmp/x"))
