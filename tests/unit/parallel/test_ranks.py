"""A rank's links: its groups, what it exchanges, and whom it names where another does not come."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from meshkit.errors import DeadlineExceeded, FailedPrecondition, MeshError, Unavailable
from meshkit.modelstore.sharding import ParallelLayout
from plugins.cpu.collectives import GlooCollectives
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.runner import ParallelOptions
from tests.unit.parallel.rank_threads import errors_of_ranks, run_ranks
from worker_svc.parallel.ranks import Ranks, groups_of, require_collectives

TWO = ParallelLayout(tensor=2)
FOUR = ParallelLayout(tensor=2, pipeline=2)
HOST = torch.device("cpu")
SHORT_S = 0.5
ANYTHING_BUT_A_HANG_S = 30.0


def joined(options: ParallelOptions) -> Ranks:
    ranks = Ranks(GlooCollectives(), options, device=HOST)
    ranks.join()
    return ranks


def test_a_rank_is_in_the_groups_of_its_place() -> None:
    assert groups_of(FOUR.place(0)) == {"world": (0, 1, 2, 3), "tensor/0": (0, 1), "pair/0/0": (0, 2)}
    assert groups_of(FOUR.place(3)) == {"world": (0, 1, 2, 3), "tensor/1": (2, 3), "pair/0/1": (1, 3)}
    middle = ParallelLayout(pipeline=3).place(1)
    assert groups_of(middle) == {"world": (0, 1, 2), "pair/0/0": (0, 1), "pair/1/0": (1, 2)}


def test_sums_gathers_and_stages_reach_the_ranks_that_they_concern() -> None:
    def work(options: ParallelOptions) -> tuple[list[float], list[list[float]], list[float]]:
        ranks = joined(options)
        own = torch.tensor([float(options.rank)])
        summed = ranks.begin_sum(own).wait().tolist()
        gathered = ranks.gather(own).tolist()
        if ranks.place.is_last_stage:
            got = ranks.receive(torch.zeros(1)).tolist()
        else:
            ranks.send(own)
            got = []
        ranks.exchange("so that nobody leaves early")
        ranks.close()
        return summed, gathered, got

    assert run_ranks(FOUR, work) == [
        ([1.0], [[0.0], [1.0]], []),
        ([1.0], [[0.0], [1.0]], []),
        ([5.0], [[2.0], [3.0]], [0.0]),
        ([5.0], [[2.0], [3.0]], [1.0]),
    ]


def test_the_first_rank_of_the_last_stage_chooses_for_all() -> None:
    def work(options: ParallelOptions) -> tuple[bool, list[int]]:
        ranks = joined(options)
        shared = ranks.share_choice(torch.full((3,), options.rank, dtype=torch.int32)).tolist()
        ranks.exchange("")
        ranks.close()
        return ranks.samples, shared

    assert run_ranks(FOUR, work) == [(rank == 2, [2, 2, 2]) for rank in range(4)]


def test_texts_of_any_length_are_exchanged() -> None:
    said = ["", "ü€ and\nmore", "x" * 5000]

    def work(options: ParallelOptions) -> list[tuple[str, ...]]:
        ranks = joined(options)
        heard = [ranks.exchange(said[options.rank]), ranks.exchange("")]
        ranks.close()
        return heard

    wanted = [tuple(said), ("", "", "")]
    assert run_ranks(ParallelLayout(pipeline=3), work) == [wanted] * 3


def test_a_rank_that_never_comes_to_the_meeting_is_named() -> None:
    def work(options: ParallelOptions) -> None:
        if options.rank != 2:
            joined(options)

    errors = errors_of_ranks(FOUR, work, join_timeout_s=SHORT_S)
    for rank in (0, 1, 3):
        error = errors[rank]
        assert isinstance(error, DeadlineExceeded | Unavailable), error
    first = errors[0]
    assert isinstance(first, DeadlineExceeded)
    assert first.reason == "RANKS_MISSING"
    assert "2" in first.metadata["missing"].split(", ")


def late(options: ParallelOptions, comes_never: int, done: threading.Barrier) -> None:
    """All come to their first step but one, which stays connected."""
    ranks = joined(options)
    ranks.enter_steps()
    try:
        if options.rank != comes_never and options.rank // 2 == comes_never // 2:
            ranks.begin_sum(torch.ones(1)).wait()
    finally:
        done.wait(ANYTHING_BUT_A_HANG_S)
        ranks.close()


def test_a_rank_that_is_late_for_a_step_is_named_by_its_number_in_the_set() -> None:
    done = threading.Barrier(4)
    start = time.monotonic()
    errors = errors_of_ranks(FOUR, lambda options: late(options, 3, done), step_timeout_s=SHORT_S)
    assert time.monotonic() - start < ANYTHING_BUT_A_HANG_S
    assert [type(error) for error in errors] == [type(None), type(None), DeadlineExceeded, type(None)]
    error = errors[2]
    assert isinstance(error, MeshError)
    assert (error.reason, error.metadata["missing"]) == ("RANKS_MISSING", "3")
    assert error.message.startswith("rank 3 of the set did not come in time; in group 'tensor/1'")


def test_a_rank_that_leaves_is_missed_at_once_and_takes_no_more_part() -> None:
    def work(options: ParallelOptions) -> None:
        ranks = joined(options)
        if options.rank == 1:
            ranks.close()
        ranks.begin_sum(torch.ones(1)).wait()

    start = time.monotonic()
    errors = errors_of_ranks(TWO, work)
    assert time.monotonic() - start < ANYTHING_BUT_A_HANG_S, "the limit of a step is twice that"
    for error in errors:
        assert isinstance(error, Unavailable)
        assert (error.reason, error.metadata["missing"]) == ("RANK_LOST", "1")


def test_the_loss_of_the_meeting_point_names_rank_0_also_in_groups_without_it() -> None:
    left, done = threading.Event(), threading.Barrier(4)

    def work(options: ParallelOptions) -> None:
        ranks = joined(options)
        ranks.exchange("all are there")
        ranks.enter_steps()
        if options.rank == 0:
            ranks.close()
            left.set()
        try:
            if options.rank == 3:
                assert left.wait(ANYTHING_BUT_A_HANG_S)
                ranks.receive(torch.ones(1))
        finally:
            done.wait(ANYTHING_BUT_A_HANG_S)
            ranks.close()

    errors = errors_of_ranks(FOUR, work, step_timeout_s=SHORT_S)
    assert errors[:3] == [None, None, None]
    assert isinstance(errors[3], MeshError)
    assert errors[3].metadata["missing"] == "0"
    assert "group 'pair/0/1' of ranks 1, 3" in errors[3].message


class Alone(CpuBackend):
    """A chip that reports what it is told to."""

    def __init__(self, reported: tuple[str, ...], has_collectives: bool) -> None:
        super().__init__(CpuOptions(threads=1, kernel="off"))
        self._reported = reported
        self._has = has_collectives

    @property
    def collectives(self) -> Collectives | None:
        return super().collectives if self._has else None

    def capabilities(self) -> CapabilityReport:
        return replace(super().capabilities(), collectives=self._reported)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "reported", "has", "field", "missing"),
    [
        (2, 1, (), False, "tensor_parallel_size", "all_reduce, all_gather, broadcast"),
        (1, 3, (), False, "pipeline_parallel_size", "all_reduce, all_gather, broadcast"),
        (2, 2, ("all_reduce", "barrier"), True, "tensor_parallel_size", "all_gather, broadcast"),
    ],
)
def test_a_chip_without_what_links_ranks_is_refused(
    tensor: int, pipeline: int, reported: tuple[str, ...], has: bool, field: str, missing: str
) -> None:
    options = ParallelOptions(0, tensor, pipeline, "tcp://127.0.0.1:1", 1.0, 1.0)
    with pytest.raises(FailedPrecondition, match=f"has no {missing} to link") as refusal:
        require_collectives(Alone(reported, has), options)
    assert refusal.value.field == field
    assert refusal.value.reason == "NO_COLLECTIVES"
