"""Collectives over a torch process group: all that a library such as gloo, NCCL or XCCL has in common."""

from __future__ import annotations

import abc
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshkit.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, MeshError, NotFound, Unavailable
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.collectives import Collectives
from plugins.sdk.meeting import Meeting, open_store, ranks_missing

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
"""What the class below covers, as the capability report lists it."""
_LIBRARY_MARGIN_S = 2.0
"""The library's own timeout is this much longer than ours: the other ranks name who did not come before
connections break.
"""
_SPIN_S = 0.0005
_LONGEST_PAUSE_S = 0.001
_hung: list[Group] = []
"""Groups whose work never ended: to drop one would wait for it with Python's lock held."""


@dataclass
class Group:
    """One group of this process. `calls`: primitives begun. `limit_s`: the library's own limit for one.

    `failure`: why it was given up; "": it works. `unfinished`: the work that it was given up for.
    """

    rank: int
    world_size: int
    process_group: Any
    meeting: Meeting
    timeout_s: float
    calls: int = 0
    limit_s: float = 0.0
    failure: str = ""
    unfinished: Any = None


class ProcessGroupCollectives(Collectives):
    """All primitives, and the naming of ranks that do not come. A plugin brings:

    `library` (property): name and version.
    `_open_group(...)`: the library's process group. `_close_group(...)`: what dropping it leaves behind.
    `_device()`: where it keeps tensors, for those that are made here. Default: the host.
    `_wait_blocks`: False where `Work.wait` only orders the device's streams (NCCL, XCCL). Work is polled
        then: a device on which it hangs cannot be waited for with a limit. True: `wait` blocks (gloo).
    `_set_limit(...)`: only for a library that cannot `abort`.
    `_dtypes`: what travels. `_carried(tensor)`: override where a dtype has to travel as another.
    `_synchronize()`: wait for the device. Default: nothing, for libraries whose `wait` blocks.
    `topology()`: override where links are known.

        class AcmeCollectives(ProcessGroupCollectives):
            _wait_blocks = False

            @property
            def library(self) -> str:
                return f"ACL {acme.acl_version()}"

            def _open_group(self, name, *, store, rank, world_size, timeout) -> Any:
                return acme.ProcessGroupACL(store, rank, world_size, timeout)
                # or, where torch.distributed knows it by name: new_process_group("acl", ...)

            def _device(self) -> torch.device:
                return torch.device("acme", self._index)

            def _synchronize(self) -> None:
                acme.synchronize(self._index)

    To use a primitive that the library has itself, override it and call `self._run(name, timeout_s, start)`,
    where `start` takes the process group and returns its Work.

    A call costs one short write to the store beyond the library's own time. A rank may return before others
    have come, where the library lets it (the root of a broadcast); `barrier` never does. Timeouts are at most
    the group's own. After a timeout or a lost rank the group is given up: each further primitive raises
    Unavailable until DestroyGroup.
    """

    _wait_blocks: ClassVar[bool] = True
    _dtypes: ClassVar[Sequence[torch.dtype]] = (
        torch.uint8, torch.int8, torch.int32, torch.int64,
        torch.float16, torch.float32, torch.float64, torch.bfloat16,
    )  # fmt: skip

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    @abc.abstractmethod
    def _open_group(self, name: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        """A process group of its own, beside torch's global one, with torch's calls `allreduce`, `allgather`
        and `broadcast`. `store` is for this group alone; all ranks are there. `timeout` is the library's own:
        for connecting and for each primitive. Raises RuntimeError where ranks cannot connect.
        """

    def _close_group(self, process_group: Any) -> None:
        """Before the last reference is dropped, which closes the connections."""

    def _set_limit(self, process_group: Any, timeout: timedelta) -> None:
        """The library's own timeout for the primitives that follow, for one that cannot be aborted (gloo).
        Default: it stays as at `_open_group`.
        """

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _synchronize(self) -> None:
        return

    def _carried(self, tensor: Tensor) -> Tensor:
        """The same memory as the library takes it. Raises InvalidArgument: a dtype that does not travel."""
        if tensor.dtype not in self._dtypes:
            known = ", ".join(_name(dtype) for dtype in self._dtypes)
            raise InvalidArgument(
                f"{_name(tensor.dtype)} does not travel over {self.library}; it takes {known}", field="input"
            )
        return tensor

    def init_group(self, name: str, *, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
        """Meet at the store, connect all ranks, and warm the connections up by a barrier."""
        if name in self._groups:
            raise AlreadyExists(f"this process is in group {name!r} already", field="group_name")
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidArgument(f"rank is {rank}; it has to be from 0 to {world_size - 1}", field="rank")
        deadline = time.monotonic() + timeout_s
        store = open_store(rendezvous, group=name, rank=rank, world_size=world_size, timeout_s=timeout_s)
        meeting = Meeting(store, group=name, rank=rank, world_size=world_size)
        meeting.join(timeout_s=_left(deadline))
        try:
            process_group = self._open_group(
                name,
                store=torch.distributed.PrefixStore(f"library/{name}", store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s + _LIBRARY_MARGIN_S),
            )
        except RuntimeError as error:
            raise Unavailable(f"group {name!r} cannot connect its ranks: {error}") from error
        self._groups[name] = Group(rank, world_size, process_group, meeting, timeout_s)
        try:
            self.barrier(name, timeout_s=_left(deadline))
        except BaseException:
            self.destroy_group(name)
            raise

    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """The sum."""
        result: Tensor = tensor.clone(memory_format=torch.contiguous_format)
        carried = self._carried(result)
        self._run(name, timeout_s, lambda group: group.allreduce([carried]))
        return result

    def all_gather(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """Stacked by rank."""
        source = self._carried(tensor.contiguous())
        result: Tensor = tensor.new_empty((self._group(name).world_size, *tensor.shape))
        parts = list(self._carried(result).unbind())
        self._run(name, timeout_s, lambda group: group.allgather([parts], [source]))
        return result

    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """By all_reduce, of which this rank keeps its part: gloo and XCCL have none on every build."""
        group = self._group(name)
        check_parts(tensor, group.world_size)
        summed = self.all_reduce(name, tensor, timeout_s=timeout_s)
        part = summed.chunk(group.world_size)[group.rank].clone()
        self._synchronize()
        return part

    def broadcast(self, name: str, tensor: Any, *, root: int, timeout_s: float | None = None) -> Any:
        """The root's input."""
        group = self._group(name)
        if not 0 <= root < group.world_size:
            raise InvalidArgument(f"root is {root}; ranks run from 0 to {group.world_size - 1}", field="root")
        result: Tensor = tensor.clone(memory_format=torch.contiguous_format)
        carried = self._carried(result)
        self._run(name, timeout_s, lambda process_group: process_group.broadcast(carried, root))
        return result

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """A sum of one element: it ends nowhere before it began everywhere."""
        one = torch.ones(1, device=self._device())
        self._run(name, timeout_s, lambda group: group.allreduce([one]))

    def destroy_group(self, name: str) -> None:
        """Drop the group's connections."""
        group = self._groups.pop(name, None)
        if group is None:
            return
        work = group.unfinished
        if work is None or _poll(work.is_completed, 2 * _LIBRARY_MARGIN_S):
            self._close_group(group.process_group)
        else:
            _hung.append(group)

    def topology(self) -> Sequence[LinkCapability]:
        """None known."""
        return ()

    def _group(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            raise NotFound(
                f"group {name!r} does not exist in this process; call InitGroup first", field="group_name"
            )
        return group

    def _run(self, name: str, timeout_s: float | None, start: Callable[[Any], Any]) -> None:
        """Arrive, start, and return when the work has ended.

        Raises:
            DeadlineExceeded: not in time; names the ranks that did not come. Unavailable: a rank was lost.
        """
        group = self._group(name)
        if group.failure:
            raise Unavailable(
                f"group {name!r} was given up: {group.failure}; destroy it and begin anew", reason="RANK_LOST"
            )
        limit_s = group.timeout_s if timeout_s is None else min(timeout_s, group.timeout_s)
        if limit_s != group.limit_s:
            group.limit_s = limit_s
            self._set_limit(group.process_group, timedelta(seconds=limit_s + _LIBRARY_MARGIN_S))
        group.calls += 1
        group.meeting.arrive(group.calls)
        work = None
        try:
            work = start(group.process_group)
            if self._ended(work, limit_s):
                return
        except RuntimeError as error:
            raise self._give_up(name, group, work, f"a rank of group {name!r} was lost: {error}") from error
        raise self._give_up(name, group, work, "")

    def _ended(self, work: Any, limit_s: float) -> bool:
        """Whether it ended in time. Raises RuntimeError where it failed."""
        if not self._wait_blocks:
            if not _poll(work.is_completed, limit_s):
                return False
            work.wait()
            return True
        try:
            work.wait(timedelta(seconds=max(limit_s, _LONGEST_PAUSE_S)))  # 0 would be no limit
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def _give_up(self, name: str, group: Group, work: Any, lost: str) -> MeshError:
        """The error to raise. `lost`: what the library said; "": nothing within the limit."""
        absent = group.meeting.absent(group.calls)
        error: MeshError
        if lost:
            who = f" (rank {', '.join(map(str, absent))} had not come)" if absent else ""
            error = Unavailable(lost + who, reason="RANK_LOST")
        elif absent:
            error = ranks_missing(name, group.world_size, absent)
        else:
            error = DeadlineExceeded(
                f"group {name!r}: all ranks came, but not done after {group.limit_s:g} s"
            )
        group.failure = str(error)
        group.unfinished = work
        abort = getattr(group.process_group, "abort", None)
        if abort is not None:
            abort()
        return error


def new_process_group(
    backend: str, *, store: Any, rank: int, world_size: int, name: str, timeout: timedelta
) -> Any:
    """For `_open_group`: by the name that torch.distributed has for a library. torch has no public call for a
    group beside its global one; this one has kept its leading parameters from 2.5 to 2.13.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(backend), store, group_name=f"chipmesh/{name}", timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def close_process_group(process_group: Any) -> None:
    """For `_close_group` of such a group: takes it off torch's lists, so that its name may be used again."""
    distributed: Any = importlib.import_module("torch.distributed")
    distributed.destroy_process_group(process_group)


def check_parts(tensor: Tensor, world_size: int) -> None:
    """Raise InvalidArgument unless the first dimension divides into a part for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not rows or rows % world_size:
        raise InvalidArgument(
            f"reduce_scatter splits the first dimension, {rows}, over {world_size} ranks: "
            "it has to be a multiple",
            field="input",
        )


def _poll(is_completed: Callable[[], bool], limit_s: float) -> bool:
    """Whether it was in time. No pauses at first: the host's shortest sleep outlasts short work."""
    start = time.monotonic()
    while not is_completed():
        waited = time.monotonic() - start
        if waited >= limit_s:
            return False
        time.sleep(0 if waited < _SPIN_S else min(waited / 8, _LONGEST_PAUSE_S))
    return True


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
