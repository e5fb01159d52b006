"""What collectives over any process group have in common: who did not come is named, and nobody waits on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, distributed

from meshkit.errors import DeadlineExceeded, InvalidArgument, MeshError, Unavailable
from plugins.sdk.meeting import Meeting
from plugins.sdk.process_group import ProcessGroupCollectives, close_process_group, new_process_group

WORLD = 3
TIMEOUT_S = 20.0


class Blocking(ProcessGroupCollectives):
    """gloo, whose wait blocks the host."""

    @property
    def library(self) -> str:
        return "gloo"

    def _open_group(self, name: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        return distributed.ProcessGroupGloo(store, rank, world_size, timeout)

    def _set_limit(self, process_group: Any, timeout: timedelta) -> None:
        process_group._set_default_timeout(timeout)


class Polled(Blocking):
    """The way of libraries whose wait only orders streams."""

    _wait_blocks: ClassVar[bool] = False


Kind = type[Blocking]


def on_ranks(kind: Kind, folder: Path, work: Callable[[Blocking, int], object]) -> list[object]:
    """What `work` returned on each rank; no rank leaves its group before all have returned."""
    done = threading.Barrier(WORLD)

    def run(rank: int) -> object:
        collectives = kind()
        collectives.init_group(
            "ring", rank=rank, world_size=WORLD, rendezvous=f"file://{folder}/meet", timeout_s=TIMEOUT_S
        )
        try:
            return work(collectives, rank)
        finally:
            done.wait(TIMEOUT_S)
            collectives.destroy_group("ring")

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


def failure_of(call: Callable[[], object]) -> MeshError:
    with pytest.raises(MeshError) as caught:
        call()
    return caught.value


def own(rank: int) -> Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(3, 2) + 10 * rank


@pytest.mark.parametrize("kind", [Blocking, Polled])
def test_primitives_do_what_they_say_and_leave_the_input(kind: Kind, tmp_path: Path) -> None:
    def work(it: Blocking, rank: int) -> object:
        mine = own(rank)
        results = (
            it.all_reduce("ring", mine),
            it.all_gather("ring", mine),
            it.reduce_scatter("ring", mine),
            it.broadcast("ring", mine, root=2),
        )
        assert torch.equal(mine, own(rank))
        return results

    total = own(0) + own(1) + own(2)
    for rank, results in enumerate(on_ranks(kind, tmp_path, work)):
        assert isinstance(results, tuple)
        expected = (total, torch.stack([own(0), own(1), own(2)]), total[rank : rank + 1], own(2))
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("kind", [Blocking, Polled])
def test_a_rank_that_leaves_a_primitive_out_is_named_by_all_others(kind: Kind, tmp_path: Path) -> None:
    def work(it: Blocking, rank: int) -> object:
        return rank == 1 or failure_of(lambda: it.all_reduce("ring", own(rank), timeout_s=0.3))

    first, absent, last = on_ranks(kind, tmp_path, work)
    assert absent is True
    for error in (first, last):
        assert isinstance(error, DeadlineExceeded)
        assert (error.reason, error.metadata["missing"]) == ("RANKS_MISSING", "1")


@pytest.mark.parametrize("kind", [Blocking, Polled])
def test_a_rank_that_stays_away_from_a_barrier_is_named(kind: Kind, tmp_path: Path) -> None:
    def work(it: Blocking, rank: int) -> object:
        return rank != 0 or failure_of(lambda: it.barrier("ring", timeout_s=0.3)).metadata["missing"]

    def others_come_later(it: Blocking, rank: int) -> object:
        return rank == 2 or failure_of(lambda: it.barrier("ring", timeout_s=0.3)).metadata["missing"]

    (second := tmp_path / "second").mkdir()
    assert on_ranks(kind, tmp_path, work) == ["1, 2", True, True]
    assert on_ranks(kind, second, others_come_later) == ["2", "2", True]


@pytest.mark.parametrize("kind", [Blocking, Polled])
def test_nobody_leaves_a_barrier_before_the_last_rank_comes(kind: Kind, tmp_path: Path) -> None:
    left = [threading.Event() for _ in range(WORLD)]

    def work(it: Blocking, rank: int) -> object:
        early = False
        if rank == 2:
            early = left[0].wait(0.1) or left[1].is_set()
        it.barrier("ring")
        left[rank].set()
        return early

    assert on_ranks(kind, tmp_path, work) == [False] * WORLD


def test_a_rank_that_leaves_the_group_is_named_by_its_broken_connections_or_its_absence(
    tmp_path: Path,
) -> None:
    def work(it: Blocking, rank: int) -> object:
        if rank == 1:
            it.destroy_group("ring")
            return None
        return failure_of(lambda: it.all_reduce("ring", own(rank), timeout_s=3.0))

    # Which of the two it is depends on whether the library was already waiting on the connection.
    for error in on_ranks(Blocking, tmp_path, work)[::2]:
        assert isinstance(error, Unavailable | DeadlineExceeded)
        assert error.reason in {"RANK_LOST", "RANKS_MISSING"}
        assert "rank 1" in str(error)


def test_a_group_that_was_given_up_says_so_until_it_is_begun_anew(tmp_path: Path) -> None:
    again = f"file://{tmp_path}/second"

    gave_up = threading.Barrier(WORLD)

    def work(it: Blocking, rank: int) -> object:
        if rank != 1:
            failure_of(lambda: it.barrier("ring", timeout_s=0.2))
            error = failure_of(lambda: it.all_reduce("ring", own(rank)))
            assert isinstance(error, Unavailable)
            assert "rank 1 did not come in time; destroy it and begin anew" in str(error)
        gave_up.wait(TIMEOUT_S)
        it.destroy_group("ring")
        it.init_group("ring", rank=rank, world_size=WORLD, rendezvous=again, timeout_s=TIMEOUT_S)
        return float(it.all_reduce("ring", torch.ones(1)))

    assert on_ranks(Blocking, tmp_path, work) == [3.0] * WORLD


def test_a_rank_that_went_ahead_counts_as_come() -> None:
    """The root of a broadcast may need nobody and be calls ahead when another rank gives up."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    first, second, third = (Meeting(store, group="ring", rank=rank, world_size=3) for rank in range(3))
    first.arrive(9)
    second.arrive(6)
    assert third.absent(7) == [1, 2]
    third.arrive(10)
    assert third.absent(9) == [1]


def test_a_type_that_does_not_travel_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    def work(it: Blocking, rank: int) -> object:
        error = failure_of(lambda: it.all_reduce("ring", torch.zeros(2, dtype=torch.int16)))
        assert isinstance(error, InvalidArgument)
        assert "int16 does not travel over gloo; it takes uint8" in str(error)
        return float(it.all_reduce("ring", torch.ones(1)))

    assert on_ranks(Blocking, tmp_path, work) == [3.0] * WORLD


def test_torch_makes_a_group_beside_its_global_one_and_its_name_is_free_afterwards(tmp_path: Path) -> None:
    for life in range(2):
        store = distributed.FileStore(f"{tmp_path}/{life}", 1)  # type: ignore[attr-defined]
        group = new_process_group(
            "gloo", store=store, rank=0, world_size=1, name="ring", timeout=timedelta(seconds=5)
        )
        value = torch.ones(2)
        group.allreduce([value]).wait()
        assert value.tolist() == [1.0, 1.0]
        close_process_group(group)
    assert not distributed.is_initialized()
