"""Fourth duty of a plugin: groups of ranks and their primitives."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from meshkit.errors import InvalidArgument
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.drift import ContractClass

ASYNC_ALL_REDUCE = "async_all_reduce"
"""Listed among the report's collectives where `begin_all_reduce` returns before the others have come."""


class Pending(abc.ABC):
    """A primitive that was begun."""

    @abc.abstractmethod
    def wait(self) -> Any:
        """The result, complete; the same one each time. Raises as the blocking call does."""


class Done(Pending):
    """One that had ended when it was begun."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """At once."""
        return self._result


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

        A process that is in a group of that rendezvous already meets the others there as it does in that one:
        only the first group's rank 0 holds the place, and groups of some of its ranks need none of their own.

        Raises:
            InvalidArgument: rank or rendezvous make no sense. AlreadyExists: this process is in the group.
        """

    @abc.abstractmethod
    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """The sum over all ranks; shape as the input, and the same bits on every rank."""

    def begin_all_reduce(
        self, name: str, tensor: Any, *, algorithm: str = "", timeout_s: float | None = None
    ) -> Pending:
        """`all_reduce` that is waited for later; `tensor` may not be changed before. algorithm: one of
        `algorithms`; "": by size. Several may be under way in a group: every rank begins them in the same
        order, and waits for them in that order. The timeout counts from the beginning of the wait.

        Default: complete on return, for plugins whose report does not list "async_all_reduce".

        Raises:
            InvalidArgument: (algorithm) there is none of that name. Else as `all_reduce`.
        """
        if algorithm not in ("", *self.algorithms()):
            raise InvalidArgument(
                f"algorithm is {algorithm!r}; {self.library} has {', '.join(self.algorithms())}",
                field="algorithm",
            )
        return Done(self.all_reduce(name, tensor, timeout_s=timeout_s))

    def algorithms(self) -> Sequence[str]:
        """The ways in which `all_reduce` can be carried out, by short names for people. Default: one."""
        return ("library",)

    def algorithm(self, name: str, size_bytes: int) -> str:
        """Which of `algorithms` an `all_reduce` of that size takes in a group; every rank chooses alike."""
        del name, size_bytes
        return self.algorithms()[0]

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
