"""Collectives over a torch process group: all that a library such as gloo, NCCL or XCCL has in common."""

from __future__ import annotations

import abc
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshkit.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, MeshError, NotFound, Unavailable
from meshkit.telemetry.logging import get_logger
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.collectives import ASYNC_ALL_REDUCE, Collectives, Pending
from plugins.sdk.communication import GATHER, MEASURED, TRIED_BYTES, Border, find_border
from plugins.sdk.meeting import Meeting, is_on_one_host, open_store, ranks_missing

log = get_logger(__name__)

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", ASYNC_ALL_REDUCE)
"""What the class below covers, as the capability report lists it."""
_LIBRARY_MARGIN_S = 2.0
"""The library's own timeout is this much longer than ours: the other ranks name who did not come before
connections break.
"""
_SPIN_S = 0.0005
_LONGEST_PAUSE_S = 0.001
_TRIED_CALLS = 7
"""Of each algorithm at each size, where the border is measured: the median counts, as the first are slow."""
_hung: list[Group] = []
"""Groups whose work never ended: to drop one would wait for it with Python's lock held."""


@dataclass
class Group:
    """One group of this process. `calls`: primitives begun. `limit_s`: of the one begun last.

    `border_bytes`: an all_reduce of fewer gathers. `failure`: why it was given up; "": it works. `under_way`:
    works that were begun and have not ended as far as we know.
    """

    rank: int
    world_size: int
    process_group: Any
    meeting: Meeting
    timeout_s: float
    rendezvous: str
    border_bytes: int = 0
    calls: int = 0
    limit_s: float = 0.0
    failure: str = ""
    under_way: list[Any] = field(default_factory=list)


@dataclass
class _Begun(Pending):
    """A primitive under way. end: returns when it has ended. finish: what makes the result; then `result`."""

    end: Callable[[_Begun], None]
    finish: Callable[[], Any]
    group_name: str
    group: Group
    call: int
    limit_s: float
    begun_s: float
    work: Any = None
    has_ended: bool = False
    result: Any = None

    def wait(self) -> Any:
        """As the blocking call; the result is made once."""
        if not self.has_ended:
            self.end(self)
            self.result, self.has_ended = self.finish(), True
        return self.result


class ProcessGroupCollectives(Collectives):
    """All primitives, and the naming of ranks that do not come. A plugin brings:

    `library` (property): name and version.
    `_open_group(...)`: the library's process group. `_close_group(...)`: what dropping it leaves behind.
    `_device()`: where it keeps tensors, for those that are made here. Default: the host.
    `_on_one_host` (given, at `_open_group`): all ranks are here; nothing should listen beyond this host then.
    `_wait_blocks`: False where `Work.wait` only orders the device's streams (NCCL, XCCL). Work is polled
        then: a device on which it hangs cannot be waited for with a limit. True: `wait` blocks (gloo).
    `_set_limit(...)`: only for a library that cannot `abort`.
    `_dtypes`: what travels. `_carried(tensor)`: override where a dtype has to travel as another.
    `_synchronize()`: wait for the device. Default: nothing, for libraries whose `wait` blocks.
    `_border(world_size)`: bytes below which an all_reduce gathers all inputs and adds them in the order of
        ranks, in half the rounds of a ring; "measured": found by each group as it is joined. Default 0:
        never, for libraries that choose among algorithms themselves. `border` of the constructor goes first.
    `_library_algorithm`: what the library's own is called.
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
    where `start` takes the process group and returns its Work. Works are begun without waiting for those
    before: the library has to take several at a time, as all that torch knows do.

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
    _library_algorithm: ClassVar[str] = "library"

    def __init__(self, *, border: Border | None = None) -> None:
        self._groups: dict[str, Group] = {}
        self._stores: dict[str, Any] = {}
        self._on_one_host = False
        """By rendezvous: a process that is in a group there meets the next one over the same store."""
        self._given_border = border

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

    def _border(self, world_size: int) -> Border:
        del world_size
        return 0

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
        store = self._stores.get(rendezvous)
        if store is None:
            store = open_store(rendezvous, group=name, rank=rank, world_size=world_size, timeout_s=timeout_s)
        meeting = Meeting(store, group=name, rank=rank, world_size=world_size)
        meeting.join(timeout_s=_left(deadline))
        self._on_one_host = is_on_one_host(rendezvous)
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
        self._groups[name] = Group(rank, world_size, process_group, meeting, timeout_s, rendezvous)
        self._stores[rendezvous] = store
        try:
            self.barrier(name, timeout_s=_left(deadline))
            self._settle_border(name, deadline)
        except BaseException:
            self.destroy_group(name)
            raise

    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """The sum."""
        return self.begin_all_reduce(name, tensor, timeout_s=timeout_s).wait()

    def begin_all_reduce(
        self, name: str, tensor: Any, *, algorithm: str = "", timeout_s: float | None = None
    ) -> Pending:
        """Under way on return, by the algorithm for its size."""
        chosen = algorithm or self.algorithm(name, tensor.numel() * tensor.element_size())
        if chosen not in self.algorithms():
            known = ", ".join(self.algorithms())
            raise InvalidArgument(f"algorithm is {chosen!r}; there are {known}", field="algorithm")
        return (self._begin_gather if chosen == GATHER else self._begin_sum)(name, tensor, timeout_s)

    def algorithms(self) -> Sequence[str]:
        """The library's own first."""
        return (self._library_algorithm, GATHER)

    def algorithm(self, name: str, size_bytes: int) -> str:
        """By the group's border, which is the same on every rank."""
        return GATHER if size_bytes < self._group(name).border_bytes else self._library_algorithm

    def _begin_sum(self, name: str, tensor: Any, timeout_s: float | None) -> Pending:
        """By the library: it takes the memory of the result."""
        result: Tensor = tensor.clone(memory_format=torch.contiguous_format)
        carried = self._carried(result)
        return self._begin(name, timeout_s, lambda group: group.allreduce([carried]), lambda: result)

    def _begin_gather(self, name: str, tensor: Any, timeout_s: float | None) -> Pending:
        """One round; the sum is then made here, in the same order on every rank."""
        source = self._carried(tensor.contiguous())
        inputs: Tensor = tensor.new_empty((self._group(name).world_size, *tensor.shape))
        parts = list(self._carried(inputs).unbind())

        def add() -> Tensor:
            if len(inputs) == 1:
                return inputs[0]
            total = inputs[0] + inputs[1]
            for each in inputs[2:]:
                total.add_(each)
            self._synchronize()
            return total

        return self._begin(name, timeout_s, lambda group: group.allgather([parts], [source]), add)

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
        if all(each.rendezvous != group.rendezvous for each in self._groups.values()):
            self._stores.pop(group.rendezvous, None)
        if _poll(lambda: all(work.is_completed() for work in group.under_way), 2 * _LIBRARY_MARGIN_S):
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
        self._begin(name, timeout_s, start, _nothing).wait()

    def _begin(
        self, name: str, timeout_s: float | None, start: Callable[[Any], Any], finish: Callable[[], Any]
    ) -> Pending:
        """Arrive and start. finish: called once the work has ended, for the result."""
        group = self._group(name)
        _require_working(name, group)
        limit_s = group.timeout_s if timeout_s is None else min(timeout_s, group.timeout_s)
        if limit_s != group.limit_s:
            group.limit_s = limit_s
            self._set_limit(group.process_group, timedelta(seconds=limit_s + _LIBRARY_MARGIN_S))
        group.calls += 1
        group.meeting.arrive(group.calls)
        begun = _Begun(self._end, finish, name, group, group.calls, limit_s, time.monotonic())
        try:
            begun.work = start(group.process_group)
        except RuntimeError as error:
            raise self._give_up(begun, str(error)) from error
        group.under_way.append(begun.work)
        return begun

    def _end(self, begun: _Begun) -> None:
        """Return when it has ended."""
        _require_working(begun.group_name, begun.group)
        try:
            if self._ended(begun.work, begun.limit_s):
                begun.group.under_way.remove(begun.work)
                return
        except RuntimeError as error:
            raise self._give_up(begun, str(error)) from error
        raise self._give_up(begun, "")

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

    def _give_up(self, begun: _Begun, said: str) -> MeshError:
        """The error to raise. `said`: how the library failed; "": nothing within the limit."""
        name, group = begun.group_name, begun.group
        absent = group.meeting.absent(begun.call)
        # Begun long before it was waited for, it may have met the library's own limit first.
        late = time.monotonic() - begun.begun_s >= begun.limit_s
        error: MeshError
        if absent and (late or not said):
            error = ranks_missing(name, group.world_size, absent)
        elif said:
            who = f" (rank {', '.join(map(str, absent))} had not come)" if absent else ""
            error = Unavailable(
                f"a rank of group {name!r} was lost: {said}{who}",
                reason="RANK_LOST",
                missing=", ".join(map(str, absent)),
            )
        else:
            error = DeadlineExceeded(
                f"group {name!r}: all ranks came, but not done after {begun.limit_s:g} s"
            )
        if group.meeting.is_lost:
            error.metadata["meeting_point"] = "lost"
        group.failure = str(error)
        abort = getattr(group.process_group, "abort", None)
        if abort is not None:
            abort()
        return error

    def _settle_border(self, name: str, deadline: float) -> None:
        """As rank 0 has it, whatever this rank was given: all have to choose alike. Tells the log."""
        group = self._group(name)
        own = self._border(group.world_size) if self._given_border is None else self._given_border
        wanted = group.meeting.hear_first("border", str(own), timeout_s=_left(deadline))
        if group.world_size > 1:
            measured = wanted == MEASURED
            group.border_bytes = self._measured_border(name, deadline) if measured else int(wanted)
        log.info(
            "joined a group of ranks",
            group=name,
            rank=group.rank,
            world_size=group.world_size,
            library=self.library,
            all_reduce=_describe_choice(group.border_bytes, self._library_algorithm),
            border=wanted,
        )

    def _measured_border(self, name: str, deadline: float) -> int:
        """By the mean over ranks of each one's median: the sums have the same bits everywhere, so that all
        ranks find the same.
        """
        own = [
            [self._try(name, algorithm, size, deadline) for size in TRIED_BYTES]
            for algorithm in (GATHER, self._library_algorithm)
        ]
        times = torch.tensor(own, dtype=torch.float32, device=self._device())
        total = self._begin_gather(name, times, _left(deadline)).wait().tolist()
        return find_border(*total)

    def _try(self, name: str, algorithm: str, size_bytes: int, deadline: float) -> float:
        tensor = torch.zeros(size_bytes // 4, device=self._device())
        durations = []
        for _ in range(_TRIED_CALLS):
            start = time.perf_counter()
            self.begin_all_reduce(name, tensor, algorithm=algorithm, timeout_s=_left(deadline)).wait()
            self._synchronize()
            durations.append(time.perf_counter() - start)
        return statistics.median(durations)


def _require_working(name: str, group: Group) -> None:
    if group.failure:
        raise Unavailable(
            f"group {name!r} was given up: {group.failure}; destroy it and begin anew", reason="RANK_LOST"
        )


def _describe_choice(border_bytes: int, library: str) -> str:
    if not border_bytes:
        return library
    return f"{GATHER} below {border_bytes} bytes, {library} from there on"


def _nothing() -> None:
    return


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
