"""Collectives over XCCL, which torch.distributed knows on this chip as `nccl`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from meshkit.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from plugins.kunlun.meeting import check_in, open_store
from plugins.kunlun.runtime import COLLECTIVE_BACKEND, Runtime
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.collectives import Collectives

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
_DTYPES = (
    torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16,
)  # fmt: skip


@dataclass
class _Group:
    rank: int
    world_size: int
    store: Any
    process_group: Any
    timeout_s: float
    calls: int = 0


class XcclCollectives(Collectives):
    """A process group for each of our groups. Ranks check in at the store before each primitive: one that
    never comes is named instead of waited for.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._groups: dict[str, _Group] = {}

    @property
    def library(self) -> str:
        """XCCL comes with the runtime and tells no version of its own."""
        kind = "gloo in place of XCCL, emulated" if self._runtime.emulated else "XCCL"
        return f"{kind} (torch {torch.__version__}, backend {COLLECTIVE_BACKEND})"

    def init_group(self, name: str, *, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
        """Meet at the store, connect all ranks, and warm the connections up by a sum of one element."""
        if name in self._groups:
            raise AlreadyExists(f"this process is in group {name!r} already", field="group_name")
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidArgument(f"rank is {rank}; it has to be from 0 to {world_size - 1}", field="rank")
        deadline = time.monotonic() + timeout_s
        store = open_store(rendezvous, group=name, rank=rank, world_size=world_size, timeout_s=timeout_s)
        left = check_in(
            store, f"join/{name}", group=name, rank=rank, world_size=world_size, deadline=deadline
        )
        try:
            process_group = self._runtime.new_process_group(
                backend=COLLECTIVE_BACKEND,
                store=store,
                rank=rank,
                world_size=world_size,
                name=name,
                timeout=timedelta(seconds=left),
            )
        except RuntimeError as error:
            raise Unavailable(f"group {name!r} cannot connect its ranks: {error}") from error
        self._groups[name] = _Group(rank, world_size, store, process_group, timeout_s)
        one = torch.ones(1, device=self._runtime.torch_device(self._runtime.device))
        try:
            self.all_reduce(name, one, timeout_s=left)
        except BaseException:
            self.destroy_group(name)
            raise

    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """The sum."""
        result: Tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._run(name, timeout_s, lambda group: group.allreduce([_carried(result)]))
        return result

    def all_gather(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """Stacked by rank."""
        source: Tensor = tensor.contiguous()
        parts = [torch.empty_like(source) for _ in range(self._group(name).world_size)]
        outputs = [_carried(part) for part in parts]
        self._run(name, timeout_s, lambda group: group.allgather([outputs], [_carried(source)]))
        return torch.stack(parts)

    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """By all_reduce, of which this rank keeps its part."""
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
        result: Tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._run(name, timeout_s, lambda process_group: process_group.broadcast(_carried(result), root))
        return result

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """The check-in at the store is the barrier."""
        self._check_in(name, timeout_s)

    def destroy_group(self, name: str) -> None:
        """Drop the group's connections."""
        self._groups.pop(name, None)

    def topology(self) -> Sequence[LinkCapability]:
        """Not known: the runtime tells no bandwidths."""
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
        deadline = time.monotonic() + (group.timeout_s if timeout_s is None else timeout_s)
        group.calls += 1
        return check_in(
            group.store,
            f"call/{name}/{group.calls}",
            group=name,
            rank=group.rank,
            world_size=group.world_size,
            deadline=deadline,
        )

    def _run(self, name: str, timeout_s: float | None, start: Callable[[Any], Any]) -> None:
        left = self._check_in(name, timeout_s)
        try:
            start(self._group(name).process_group).wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise Unavailable(f"a rank of group {name!r} was lost: {error}", reason="RANK_LOST") from error
        # wait() orders the device's streams only; a primitive is complete on return.
        self._runtime.synchronize()


def _carried(tensor: Tensor) -> Tensor:
    """The tensor as XCCL takes it: int8 travels as uint8, whose sums wrap to the same bits."""
    if tensor.dtype == torch.int8:
        return tensor.view(torch.uint8)
    if tensor.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise InvalidArgument(
            f"{str(tensor.dtype).removeprefix('torch.')} does not travel over XCCL; it takes {names}, int8",
            field="input",
        )
    return tensor
