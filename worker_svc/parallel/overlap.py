"""A sum over ranks that travels while the next rows are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plugins.sdk.collectives import Pending

MOST_PIECES = 4
"""More would make each one's product and message small, and neither is cheap then."""


def sum_of(
    function: Callable[[Tensor], Tensor], x: Tensor, begin: Callable[[Tensor], Pending], *, rows: int = 0
) -> Tensor:
    """`begin(function(x)).wait()` in effect. x: [t, ...], function: each row by itself; t does not change.

    rows: the least of a piece; from two pieces on the sum of one is under way while the next is computed. 0:
    never split, which is right where `begin` returns no earlier than the sum is there. Bits: a library's
    product of fewer rows may take another order, as it does in another batch; all else is by row.
    """
    count = 0 if rows < 1 else min(x.shape[0] // rows, MOST_PIECES)
    if count < 2:
        return _tensor(begin(function(x)).wait())
    pending = [begin(function(piece)) for piece in x.tensor_split(count)]
    return torch.cat([_tensor(each.wait()) for each in pending])


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor), "a sum of tensors is one"
    return value
