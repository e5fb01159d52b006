"""What collectives over any process group have in common: who did not come is named, and nobody waits on."""

from __future__ import annotations

import logging
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
from plugins.cpu.options import read_options as read_cpu_options
from plugins.cuda.options import read_options as read_cuda_options
from plugins.kunlun.options import read_options as read_kunlun_options
from plugins.sdk.communication import TRIED_BYTES, Border, find_border, read_communication
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


class Gathering(Blocking):
    """Every sum by the algorithm of few rounds, blocking."""

    def _border(self, world_size: int) -> Border:
        return 1 << 30


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


@pytest.mark.parametrize("kind", [Blocking, Polled, Gathering])
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


@pytest.mark.parametrize("kind", [Blocking, Polled, Gathering])
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


# ---------------------------------------------------------------- sums that are begun


@pytest.mark.parametrize("kind", [Blocking, Polled, Gathering])
def test_several_sums_are_under_way_in_a_group_before_the_others_have_come(
    kind: Kind, tmp_path: Path
) -> None:
    begun = threading.Event()

    def work(it: Blocking, rank: int) -> object:
        if rank == 2:
            assert begun.wait(TIMEOUT_S), "to begin a sum waited for the other ranks"
        tensors = [own(rank) * factor for factor in range(1, 5)]
        pending = [it.begin_all_reduce("ring", tensor) for tensor in tensors]
        if rank == 0:
            begun.set()
        sums = [each.wait() for each in pending]
        assert pending[0].wait() is sums[0], "the result of a wait is made once"
        assert torch.equal(tensors[3], own(rank) * 4), "the input was overwritten"
        return sums

    total = own(0) + own(1) + own(2)
    for sums in on_ranks(kind, tmp_path, work):
        assert isinstance(sums, list)
        assert all(torch.equal(each, total * factor) for factor, each in enumerate(sums, start=1))


@pytest.mark.parametrize("kind", [Blocking, Polled, Gathering])
def test_a_rank_that_never_comes_to_a_sum_under_way_is_named_and_the_others_in_flight_end(
    kind: Kind, tmp_path: Path
) -> None:
    def work(it: Blocking, rank: int) -> object:
        first = it.begin_all_reduce("ring", own(rank), timeout_s=0.5)
        if rank == 1:
            return first.wait()
        second, third = (it.begin_all_reduce("ring", own(rank), timeout_s=0.5) for _ in range(2))
        first.wait()
        return failure_of(second.wait), failure_of(third.wait)

    first, absent, last = on_ranks(kind, tmp_path, work)
    assert torch.equal(absent, own(0) + own(1) + own(2))  # type: ignore[arg-type]
    for errors in (first, last):
        assert isinstance(errors, tuple)
        assert isinstance(errors[0], DeadlineExceeded)
        assert (errors[0].reason, errors[0].metadata["missing"]) == ("RANKS_MISSING", "1")
        assert isinstance(errors[1], Unavailable)
        assert "was given up: group 'ring' of 3 ranks: rank 1 did not come in time" in str(errors[1])


def test_the_time_that_is_computed_between_beginning_and_wait_does_not_count(tmp_path: Path) -> None:
    waits = threading.Event()

    def work(it: Blocking, rank: int) -> object:
        if rank == 2:
            assert waits.wait(TIMEOUT_S)
        pending = it.begin_all_reduce("ring", own(rank), timeout_s=1.0)
        if rank != 2:
            threading.Event().wait(1.2)  # Computing for longer than the limit.
            waits.set()
        return pending.wait()

    total = own(0) + own(1) + own(2)
    assert all(torch.equal(total, each) for each in on_ranks(Blocking, tmp_path, work))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the algorithm by size


def uneven(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values whose sum depends on the order."""
    return (torch.sin(torch.arange(count) * (rank + 1.37)) * 1000.0**rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["library", "gather"])
def test_each_algorithm_gives_the_same_bits_on_every_rank(
    algorithm: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    def work(it: Blocking, rank: int) -> object:
        sizes = (1, 7, 1000, 100_000)
        return [
            it.begin_all_reduce("ring", uneven(rank, count, dtype), algorithm=algorithm).wait()
            for count in sizes
        ]

    first, *others = on_ranks(Blocking, tmp_path, work)
    assert isinstance(first, list)
    exact = torch.stack([uneven(rank, 100_000, dtype).double() for rank in range(WORLD)]).sum(dim=0)
    assert (first[-1].double() - exact).abs().max() < 0.01 * exact.abs().max()
    for sums in others:
        assert isinstance(sums, list)
        assert all(map(torch.equal, first, sums))


def test_a_gathered_sum_is_added_in_the_order_of_ranks(tmp_path: Path) -> None:
    def work(it: Blocking, rank: int) -> object:
        return it.all_reduce("ring", uneven(rank, 500))

    in_order = (uneven(0, 500) + uneven(1, 500)) + uneven(2, 500)
    assert not torch.equal(in_order, uneven(0, 500) + (uneven(1, 500) + uneven(2, 500))), "no order shows"
    assert all(torch.equal(in_order, each) for each in on_ranks(Gathering, tmp_path, work))  # type: ignore[arg-type]


class Bordered(Blocking):
    def _border(self, world_size: int) -> Border:
        return 100 * world_size


class Measured(Blocking):
    def _border(self, world_size: int) -> Border:
        return "measured"


def test_a_sum_below_the_border_gathers_and_the_others_are_the_librarys(tmp_path: Path) -> None:
    def work(it: Blocking, rank: int) -> object:
        with pytest.raises(InvalidArgument, match="algorithm is 'tree'; there are library, gather"):
            it.begin_all_reduce("ring", own(rank), algorithm="tree")
        return [it.algorithm("ring", size) for size in (0, 299, 300, 1 << 30)]

    assert on_ranks(Bordered, tmp_path, work) == [["gather", "gather", "library", "library"]] * WORLD


def test_every_rank_measures_the_same_border(tmp_path: Path) -> None:
    borders = on_ranks(Measured, tmp_path, lambda it, rank: it._group("ring").border_bytes)
    assert len(set(borders)) == 1
    assert borders[0] in (0, *TRIED_BYTES)


@pytest.mark.parametrize("given", [("measured", 512), (4096, 0), (0, "measured")])
def test_the_border_of_rank_0_counts_for_all_and_is_told_at_the_joining(
    given: tuple[Border, Border], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def join(rank: int) -> int:
        it = Blocking(border=given[rank])
        meeting = f"file://{tmp_path}/meet"
        it.init_group("pair", rank=rank, world_size=2, rendezvous=meeting, timeout_s=TIMEOUT_S)
        it.barrier("pair")
        border = it._group("pair").border_bytes
        it.destroy_group("pair")
        return border

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
    assert first == second
    assert given[0] in ("measured", first)
    assert caplog.text.count("joined a group of ranks") == 2
    assert caplog.text.count(f"'border': '{given[0]}'") == 2
    choice = f"gather below {first} bytes, library from there on" if first else "library"
    assert caplog.text.count(f"'all_reduce': '{choice}'") == 2


def test_the_border_is_the_first_size_at_which_gathering_is_not_faster() -> None:
    slower = [2.0] * len(TRIED_BYTES)
    assert find_border([1.0] * len(TRIED_BYTES), slower) == TRIED_BYTES[-1]
    assert find_border([2.0, *[1.0] * (len(TRIED_BYTES) - 1)], slower) == 0
    assert find_border([1.0, 1.0, 3.0, *[1.0] * (len(TRIED_BYTES) - 3)], slower) == TRIED_BYTES[2]


def test_options_set_border_and_rows_or_are_refused_by_name() -> None:
    read = read_communication({"all_reduce_border": "4096", "overlap_rows": "256"})
    assert (read.border, read.overlap_rows) == (4096, 256)
    assert read_communication({"all_reduce_border": "measured"}).border == "measured"
    for plugin in (read_cpu_options, read_cuda_options, read_kunlun_options):
        read_by_it = plugin({"all_reduce_border": "4096", "overlap_rows": "256"})
        assert read_by_it.communication == read
        assert plugin({}).communication == read_communication({})
    unset = read_communication({})
    assert (unset.border, unset.overlap_rows) == (None, None)
    for options in (
        {"all_reduce_border": "64KiB"}, {"all_reduce_border": "-1"}, {"overlap_rows": "measured"},
        {"overlap_rows": str(1 << 31)},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument) as caught:
            read_communication(options)
        assert caught.value.field == f"backend_options.{next(iter(options))}"
