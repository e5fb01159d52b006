"""A sum over ranks of a function of rows: in one piece, or in pieces that travel while others are made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugins.sdk.collectives import Pending
from worker_svc.parallel.overlap import MOST_PIECES, sum_of


class Ring:
    """Two ranks that have the same: a sum doubles. log: what happened, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def function(self, x: Tensor) -> Tensor:
        self.log.append(("compute", len(x)))
        return x * 3 + 1

    def begin(self, x: Tensor) -> Pending:
        self.log.append(("begin", len(x)))
        return Doubled(self, x)


class Doubled(Pending):
    def __init__(self, ring: Ring, x: Tensor) -> None:
        self._ring = ring
        self._x = x

    def wait(self) -> Tensor:
        self._ring.log.append(("wait", len(self._x)))
        return self._x * 2


@pytest.mark.parametrize("rows", [0, 6, 10])
def test_rows_that_are_too_few_for_two_pieces_stay_together(rows: int) -> None:
    ring = Ring()
    sum_of(ring.function, torch.zeros(10, 4), ring.begin, rows=rows)
    assert ring.log == [("compute", 10), ("begin", 10), ("wait", 10)]


def test_the_sum_of_a_piece_is_under_way_while_the_next_is_computed() -> None:
    ring = Ring()
    sum_of(ring.function, torch.zeros(10, 4), ring.begin, rows=5)
    assert ring.log == [
        ("compute", 5), ("begin", 5), ("compute", 5), ("begin", 5), ("wait", 5), ("wait", 5),
    ]  # fmt: skip


@given(st.integers(0, 40), st.integers(0, 12))
def test_the_pieces_make_up_the_whole_and_none_is_below_the_bound(count: int, rows: int) -> None:
    ring, x = Ring(), torch.arange(float(count * 3)).reshape(count, 3)
    assert torch.equal(sum_of(ring.function, x, ring.begin, rows=rows), (x * 3 + 1) * 2)
    pieces = [length for what, length in ring.log if what == "compute"]
    assert len(pieces) <= MOST_PIECES
    assert len(pieces) == 1 or min(pieces) >= rows
