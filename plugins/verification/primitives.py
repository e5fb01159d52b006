"""The primitives by definition: what each rank gives, what each has to receive, and how many bytes travel.

Inputs are whole numbers below 128, so that sums over up to 64 ranks are exact in float32, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.sdk.collectives import Collectives

ELEMENT_BYTES = 4
_PERIOD = 127
"""A prime: a segment that lands in another's place shows, since no size here is a multiple of it."""

Array = NDArray[np.float32]
Inputs = Sequence[Callable[[], Array]]
"""What makes each rank's input, by rank: not all of them have to be in memory at once."""


@dataclass(frozen=True)
class Primitive:
    """One primitive over tensors of float32.

    input_of(rank, world_size, size_bytes): what a rank gives. expected(rank, root, inputs): what it has to
    receive. call(collectives, group, tensor, root). bus_factor(world_size): bytes that each link has to carry
    for each byte of the size, on a ring; size × factor / time cannot exceed a link's rate.
    """

    input_of: Callable[[int, int, int], Array]
    expected: Callable[[int, int, Inputs], Array]
    call: Callable[[Collectives, str, Any, int], Any]
    bus_factor: Callable[[int], float]


def _whole(rank: int, world_size: int, size_bytes: int) -> Array:
    """The size is that of the input."""
    del world_size
    return _pattern(rank, max(size_bytes // ELEMENT_BYTES, 1))


def _part(rank: int, world_size: int, size_bytes: int) -> Array:
    """The size is that of all ranks' inputs together."""
    return _pattern(rank, max(size_bytes // ELEMENT_BYTES // world_size, 1))


def _multiple(rank: int, world_size: int, size_bytes: int) -> Array:
    """The size is that of the input, cut to a multiple of the number of ranks."""
    return _pattern(rank, max(size_bytes // ELEMENT_BYTES // world_size, 1) * world_size)


def _pattern(rank: int, count: int) -> Array:
    return ((np.arange(count, dtype=np.int64) * (rank + 3) + 31 * rank) % _PERIOD).astype(np.float32)


def _sum(inputs: Inputs) -> Array:
    total = inputs[0]()
    for give in inputs[1:]:
        total += give()
    return total


def _share(rank: int, inputs: Inputs) -> Array:
    return np.split(_sum(inputs), len(inputs))[rank]


def _ring_share(world_size: int) -> float:
    return (world_size - 1) / world_size


ALL_REDUCE = "all_reduce"
PRIMITIVES: Mapping[str, Primitive] = {
    ALL_REDUCE: Primitive(
        _whole,
        lambda rank, root, inputs: _sum(inputs),
        lambda it, group, tensor, root: it.all_reduce(group, tensor),
        lambda world_size: 2 * _ring_share(world_size),
    ),
    "all_gather": Primitive(
        _part,
        lambda rank, root, inputs: np.stack([give() for give in inputs]),
        lambda it, group, tensor, root: it.all_gather(group, tensor),
        _ring_share,
    ),
    "reduce_scatter": Primitive(
        _multiple,
        lambda rank, root, inputs: _share(rank, inputs),
        lambda it, group, tensor, root: it.reduce_scatter(group, tensor),
        _ring_share,
    ),
    "broadcast": Primitive(
        _whole,
        lambda rank, root, inputs: inputs[root](),
        lambda it, group, tensor, root: it.broadcast(group, tensor, root=root),
        lambda world_size: 1.0,
    ),
}
"""By name; `barrier` carries nothing and is looked at apart."""
BARRIER = "barrier"


def by_algorithm(algorithm: str) -> Primitive:
    """all_reduce by a certain algorithm, whatever the size."""

    def call(it: Collectives, group: str, tensor: Any, root: int) -> Any:
        del root
        return it.begin_all_reduce(group, tensor, algorithm=algorithm).wait()

    return replace(PRIMITIVES[ALL_REDUCE], call=call)


def find_difference(expected: Array, received: Array) -> str:
    """The empty text where both are equal, else the first element that is not."""
    if received.shape != expected.shape:
        return f"shape {list(received.shape)} instead of {list(expected.shape)}"
    differ = np.flatnonzero(received.reshape(-1) != expected.reshape(-1))  # a NaN differs from everything
    if not differ.size:
        return ""
    first = int(differ[0])
    return (
        f"{differ.size} of {expected.size} elements differ, the first at {first}: "
        f"{expected.reshape(-1)[first]:g} wanted, {received.reshape(-1)[first]:g} received"
    )
