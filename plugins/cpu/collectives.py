"""Collectives over gloo, through torch.distributed's process group without its global state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed

from meshkit.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.collectives import Collectives

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
_POLL_S = 0.01


def gloo_is_available() -> bool:
    """Whether this torch was built with gloo."""
    return bool(distributed.is_available() and distributed.is_gloo_available())


@dataclass
class _Group:
    rank: int
    world_size: int
    store: Any
    process_group: Any
    timeout_s: float
    calls: int = 0


class GlooCollectives(Collectives):
    """Each group has its own store and process group. Before each primitive every rank checks in at the
    store, so that a rank that never comes is named instead of waited for.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    @property
    def library(self) -> str:
        """gloo has no version of its own: it comes with torch."""
        return f"gloo (torch {torch.__version__})"

    def init_group(self, name: str, *, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
        """Meet at the store, then connect all ranks."""
        if name in self._groups:
            raise AlreadyExists(f"this process is in group {name!r} already", field="group_name")
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidArgument(f"rank is {rank}; it has to be from 0 to {world_size - 1}", field="rank")
        deadline = time.monotonic() + timeout_s
        store = _open_store(name, rendezvous, rank, world_size, timeout_s)
        _check_in(store, name, f"join/{name}", rank, world_size, deadline)
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
        try:
            own = distributed.PrefixStore(f"gloo/{name}", store)  # type: ignore[attr-defined]
            process_group = distributed.ProcessGroupGloo(own, rank, world_size, left)
        except RuntimeError as error:
            raise Unavailable(f"group {name!r} cannot connect its ranks: {error}") from error
        self._groups[name] = _Group(rank, world_size, store, process_group, timeout_s)

    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """The sum."""
        result: Tensor = tensor.clone().contiguous()
        self._run(name, timeout_s, lambda group: group.allreduce([result]))
        return result

    def all_gather(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """Stacked by rank."""
        source: Tensor = tensor.contiguous()
        parts = [torch.empty_like(source) for _ in range(self._group(name).world_size)]
        self._run(name, timeout_s, lambda group: group.allgather([parts], [source]))
        return torch.stack(parts)

    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """By all_reduce: gloo has no reduce_scatter of its own on every build."""
        group = self._group(name)
        rows = tensor.shape[0] if tensor.dim() else 0
        if not rows or rows % group.world_size:
            raise InvalidArgument(
                f"reduce_scatter splits the first dimension, {rows}, over {group.world_size} ranks: "
                "it has to be a multiple",
                field="input",
            )
        summed = self.all_reduce(name, tensor, timeout_s=timeout_s)
        return summed.chunk(group.world_size)[group.rank].clone()

    def broadcast(self, name: str, tensor: Any, *, root: int, timeout_s: float | None = None) -> Any:
        """The root's input."""
        group = self._group(name)
        if not 0 <= root < group.world_size:
            raise InvalidArgument(f"root is {root}; ranks run from 0 to {group.world_size - 1}", field="root")
        result: Tensor = tensor.clone().contiguous()
        self._run(name, timeout_s, lambda process_group: process_group.broadcast(result, root))
        return result

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """The check-in at the store is the barrier."""
        self._check_in(name, timeout_s)

    def destroy_group(self, name: str) -> None:
        """Drop the group's connections."""
        self._groups.pop(name, None)

    def topology(self) -> Sequence[LinkCapability]:
        """One device, no links."""
        return ()

    def _group(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            raise NotFound(
                f"group {name!r} does not exist in this process; call InitGroup first", field="group_name"
            )
        return group

    def _check_in(self, name: str, timeout_s: float | None) -> float:
        """Returns the seconds left."""
        group = self._group(name)
        limit = group.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        group.calls += 1
        _check_in(group.store, name, f"call/{name}/{group.calls}", group.rank, group.world_size, deadline)
        return max(deadline - time.monotonic(), 0.1)

    def _run(self, name: str, timeout_s: float | None, start: Callable[[Any], Any]) -> None:
        left = self._check_in(name, timeout_s)
        try:
            start(self._group(name).process_group).wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise Unavailable(f"a rank of group {name!r} was lost: {error}", reason="RANK_LOST") from error


def _open_store(name: str, rendezvous: str, rank: int, world_size: int, timeout_s: float) -> Any:
    parts = urlsplit(rendezvous)
    timeout = timedelta(seconds=timeout_s)
    if parts.scheme == "file" and parts.path:
        return distributed.FileStore(parts.path, world_size)  # type: ignore[attr-defined]
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        try:
            return distributed.TCPStore(  # type: ignore[attr-defined]
                parts.hostname,
                parts.port,
                world_size,
                is_master=rank == 0,
                timeout=timeout,
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"group {name!r}: rank 0, which holds the meeting point {rendezvous}, did not come: {error}",
                field="rendezvous",
                reason="RANKS_MISSING",
                missing="0",
            ) from error
    raise InvalidArgument(
        f"rendezvous is {rendezvous!r}; write tcp://HOST:PORT or file:///PATH", field="rendezvous"
    )


def _check_in(store: Any, name: str, key: str, rank: int, world_size: int, deadline: float) -> None:
    """Tell the store that `rank` is here and wait for the others; raises DeadlineExceeded that names them."""
    store.set(f"{key}/{rank}", "here")
    missing = [other for other in range(world_size) if other != rank]
    while missing:
        missing = [other for other in missing if not store.check([f"{key}/{other}"])]
        if missing and time.monotonic() >= deadline:
            ranks = ", ".join(map(str, missing))
            raise DeadlineExceeded(
                f"group {name!r} of {world_size} ranks: rank {ranks} did not come in time",
                reason="RANKS_MISSING",
                missing=ranks,
            )
        if missing:
            time.sleep(_POLL_S)
