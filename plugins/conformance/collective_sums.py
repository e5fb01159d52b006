"""What only sums over ranks are asked: equal bits everywhere, several under way, an absent rank named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from meshkit.errors import DeadlineExceeded, MeshError
from plugins.sdk.collectives import Collectives

COUNTS = (5, 6_000, 100_000)
"""Elements: on both sides of any sensible border between algorithms."""
_IN_FLIGHT = 4
_LIMIT_S = 0.5
"""For the sum to which one rank does not come."""
_BEGUN_LIMIT_S = 30.0
"""Within which a rank has to begin a sum that no other has begun yet."""
_POLL_S = 0.002


class Sums:
    """Checks of one rank; every rank makes them in the same order. Each returns "" or what was wrong.

    send, receive: a host tensor to the device and back. rendezvous: where the ranks met.
    """

    def __init__(
        self,
        collectives: Collectives,
        group: str,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        send: Callable[[Tensor], Any],
        receive: Callable[[Any], Tensor],
    ) -> None:
        self._collectives = collectives
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._rendezvous = rendezvous
        self._send = send
        self._receive = receive

    def unequal_bits(self, dtype: str) -> str:
        """By each algorithm: the sum is close, and all ranks have the same bits of it. Needs all_gather."""
        for algorithm in self._collectives.algorithms():
            for count in COUNTS:
                inputs = [_uneven(rank, count, dtype) for rank in range(self._world_size)]
                total = self._begin(inputs[self._rank], algorithm).wait()
                everywhere = self._receive(self._collectives.all_gather(self._group, total))
                what = f"all_reduce of {dtype} [{count}] by {algorithm}"
                if not all(torch.equal(everywhere[0], each) for each in everywhere):
                    return f"{what}: ranks have different bits of the sum"
                if _is_far(everywhere[0], inputs):
                    return f"{what}: the sum is beyond its rounding"
        return ""

    def begun_sums(self, dtype: str) -> str:
        """Several sums, small and large, under way at once; each is its own, and the inputs stay."""
        sent = [_whole(self._rank, number, dtype) for number in range(_IN_FLIGHT)]
        held = [self._send(each) for each in sent]
        pending = [self._collectives.begin_all_reduce(self._group, each) for each in held]
        for number, each in enumerate(pending):
            what = f"sum {number + 1} of {_IN_FLIGHT} under way, {dtype} {list(sent[number].shape)}"
            whole = [_whole(rank, number, "float64") for rank in range(self._world_size)]
            received = self._receive(each.wait())
            if not _same(received, torch.stack(whole).sum(dim=0)):
                return f"{what}: it is wrong"
            if not torch.equal(self._receive(each.wait()), received):
                return f"{what}: a second wait gives another result"
            if not torch.equal(self._receive(held[number]), sent[number]):
                return f"{what}: the input was overwritten"
        return ""

    def begins_alone(self) -> str:
        """`begin_all_reduce` returns before the last rank has begun it. Only where ranks share a folder."""
        place = urlsplit(self._rendezvous)
        if place.scheme != "file" or self._world_size == 1:
            return ""
        mark, last = Path(f"{place.path}.begun"), self._rank == self._world_size - 1
        came = not last or _appears(mark)
        pending = self._begin(torch.ones(3), "")
        if self._rank == 0:
            mark.touch()
        pending.wait()
        return "" if came else "begin_all_reduce waits for the other ranks, and async_all_reduce is declared"

    def absent_rank(self) -> str:
        """The last rank does not come to a sum: the others name it, in time."""
        if self._world_size == 1:
            return ""
        absent, group = self._world_size - 1, f"{self._group}-absent"
        self._collectives.init_group(
            group,
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=f"{self._rendezvous}-absent",
            timeout_s=_BEGUN_LIMIT_S,
        )
        problem = "" if self._rank == absent else self._unnamed(group, absent)
        self._begin(torch.ones(1), "").wait()  # The absent one keeps its connections until all have seen.
        self._collectives.destroy_group(group)
        return problem

    def _unnamed(self, group: str, absent: int) -> str:
        start = time.monotonic()
        try:
            mine = self._send(torch.ones(3))
            self._collectives.begin_all_reduce(group, mine, timeout_s=_LIMIT_S).wait()
        except DeadlineExceeded as error:
            named = str(error.metadata.get("missing", ""))
            if named != str(absent):
                return f"rank {absent} did not come to a sum; the error names {named or 'none'}"
            if time.monotonic() - start < _LIMIT_S:
                return f"rank {absent} was given up before {_LIMIT_S:g} s had passed"
            return ""
        except MeshError as error:
            return (
                f"rank {absent} did not come to a sum: {type(error).__name__}, not DeadlineExceeded: {error}"
            )
        return f"rank {absent} did not come to a sum, and no error was raised"

    def _begin(self, value: Tensor, algorithm: str) -> Any:
        return self._collectives.begin_all_reduce(self._group, self._send(value), algorithm=algorithm)


def _appears(mark: Path) -> bool:
    """Whether it is there within the limit."""
    end = time.monotonic() + _BEGUN_LIMIT_S
    while not mark.exists():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _uneven(rank: int, count: int, dtype: str) -> Tensor:
    """Values whose sum depends on the order in which it is made."""
    values = torch.sin(torch.arange(count, dtype=torch.float64) * (rank + 1.37)) * 3.0**rank
    return values.to(getattr(torch, dtype))


def _whole(rank: int, number: int, dtype: str) -> Tensor:
    """Small whole numbers, others for each number: their sum is exact in every dtype."""
    count = COUNTS[number % len(COUNTS)] + number
    return ((torch.arange(count) * 5 + 7 * rank + 3 * number) % 23 - 9).to(getattr(torch, dtype))


def _same(received: Tensor, expected: Tensor) -> bool:
    return received.shape == expected.shape and torch.equal(received.double(), expected)


def _is_far(total: Tensor, inputs: Sequence[Tensor]) -> bool:
    exact = torch.stack([each.double() for each in inputs]).sum(dim=0)
    size = torch.stack([each.double().abs() for each in inputs]).sum(dim=0)
    roundoff = torch.finfo(total.dtype).eps * len(inputs)
    return bool(((total.double() - exact).abs() > roundoff * size).any())
