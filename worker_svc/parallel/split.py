"""Parts of a model that several ranks share, put together from what each of them computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.parallel.links import RankLinks
from worker_svc.parallel.overlap import sum_of


class RowPart(Protocol):
    """Part of a layer that takes each row by itself."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Summed:
    """A part whose results on the ranks add up to that of the whole layer."""

    def __init__(self, part: RowPart, links: RankLinks) -> None:
        self._part, self._links = part, links
        self.weight_bytes = part.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in] -> [t, out], the same on every rank."""
        return sum_of(self._part, x, self._links.begin_sum, rows=self._links.piece_rows)


class SplitEmbedding:
    """Rows of a table of which each rank holds `rows`, in the order of ranks."""

    def __init__(self, embed: Callable[[Tensor], Tensor], rows: int, links: RankLinks) -> None:
        """embed: this rank's rows, by ids from 0."""
        self._embed, self._links = embed, links
        self._first, self._rows = links.place.tensor_rank * rows, rows

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [t] -> [t, hidden]. One rank has the row and the others add 0, so no bit is rounded."""
        own = token_ids - self._first
        held = (own >= 0) & (own < self._rows)
        rows = self._embed(torch.where(held, own, 0))
        summed: Tensor = self._links.begin_sum(rows.masked_fill(~held.unsqueeze(1), 0.0)).wait()
        return summed


class SplitHead:
    """Logits of a vocabulary of which each rank has equally many, in the order of ranks, less the padding."""

    def __init__(self, head: RowPart, vocabulary: int, links: RankLinks) -> None:
        self._head, self._links, self._vocabulary = head, links, vocabulary
        self.weight_bytes = head.weight_bytes

    def __call__(self, hidden: Tensor) -> Tensor:
        """[r, hidden] -> [r, vocabulary]."""
        parts = self._links.gather(self._head(hidden))
        return parts.transpose(0, 1).flatten(1)[:, : self._vocabulary].contiguous()
