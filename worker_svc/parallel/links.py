"""What a model asks of the ranks that run its other parts."""

from __future__ import annotations

from typing import NoReturn, Protocol

from torch import Tensor

from meshkit.modelstore.sharding import ALONE, RankPlace
from plugins.sdk.collectives import Pending


class RankLinks(Protocol):
    """One rank's links. Every rank makes the same calls in the same order; each returns new memory."""

    @property
    def place(self) -> RankPlace:
        """Which part of the model this rank runs."""
        ...

    @property
    def piece_rows(self) -> int:
        """Rows of the least piece of a sum that travels while the next one is computed; 0: sums are whole."""
        ...

    def begin_sum(self, x: Tensor) -> Pending:
        """The sum of x over the ranks that share this one's layers."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The same ranks' x, stacked by tensor rank: [ranks, *x]."""
        ...

    def send(self, x: Tensor) -> None:
        """To the rank with this one's tensor rank in the next stage."""
        ...

    def receive(self, like: Tensor) -> Tensor:
        """What the stage before sent, of the form of `like`."""
        ...


class NoLinks:
    """A place without links: of the one rank of a whole model, and of a part that is only looked at."""

    piece_rows = 0

    def __init__(self, place: RankPlace = ALONE) -> None:
        self.place = place

    def __repr__(self) -> str:
        return f"<NoLinks rank={self.place.rank} of {self.place.layout.world_size}>"

    def begin_sum(self, x: Tensor) -> Pending:
        """Nobody calls it."""
        self._refuse(x)

    def gather(self, x: Tensor) -> Tensor:
        """Nobody calls it."""
        self._refuse(x)

    def send(self, x: Tensor) -> None:
        """Nobody calls it."""
        self._refuse(x)

    def receive(self, like: Tensor) -> Tensor:
        """Nobody calls it."""
        self._refuse(like)

    def _refuse(self, x: Tensor) -> NoReturn:
        raise AssertionError(f"{self!r} was asked to carry a tensor of shape {list(x.shape)}")
