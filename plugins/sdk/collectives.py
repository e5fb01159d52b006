"""Fourth duty of a plugin: groups of ranks and their primitives."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.drift import ContractClass


class Collectives(ContractClass, contract=True):
    """Primitives over framework tensors. Each returns a new tensor and is complete on return.

    Every call raises NotFound for an unknown group; DeadlineExceeded, which names the ranks that did not
    come, after `timeout_s` (None: as given to `init_group`, which is also the most); and Unavailable where a
    rank was lost. After the last two the group is given up until it is destroyed. plugins.sdk.process_group
    has all of it for libraries that torch knows as a process group.
    """

    @property
    @abc.abstractmethod
    def library(self) -> str:
        """Name and version of the library in use."""

    @abc.abstractmethod
    def init_group(self, name: str, *, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
        """Join a group; returns when all ranks have. `rendezvous`: "tcp://HOST:PORT" or "file:///PATH".

        Raises:
            InvalidArgument: rank or rendezvous make no sense. AlreadyExists: this process is in the group.
        """

    @abc.abstractmethod
    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """The sum over all ranks; shape as the input."""

    @abc.abstractmethod
    def all_gather(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """All inputs stacked by rank: shape [world_size, *input]."""

    @abc.abstractmethod
    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """This rank's part of the sum. Input [world_size * n, ...], output [n, ...]."""

    @abc.abstractmethod
    def broadcast(self, name: str, tensor: Any, *, root: int, timeout_s: float | None = None) -> Any:
        """The root's input; the others' inputs give shape and dtype only."""

    @abc.abstractmethod
    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """Return when all ranks have come. From other primitives a rank may return before."""

    @abc.abstractmethod
    def destroy_group(self, name: str) -> None:
        """Leave a group. Idempotent: an unknown group is fine."""

    @abc.abstractmethod
    def topology(self) -> Sequence[LinkCapability]:
        """Links between this process's devices, as far as known."""
