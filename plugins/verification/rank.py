"""One rank of `chipmesh collectives`: runs in a process of its own, tells its parent each outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshkit.cli.terminal import describe_error
from meshkit.errors import MeshError
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.collectives import Collectives
from plugins.sdk.registry import load_backend, read_info
from plugins.verification.arrays import decode, encode
from plugins.verification.primitives import (
    ALL_REDUCE,
    BARRIER,
    PRIMITIVES,
    Array,
    Primitive,
    by_algorithm,
    find_difference,
)
from plugins.verification.request import BackendChoice, identity_of, usage_error
from plugins.verification.spawned import Channel

GROUP = "verification"
_STAGGER_S = 0.02
"""By how much each rank comes later than the one before to the barrier that is looked at."""


@dataclass(frozen=True)
class RankTask:
    """What one rank is to do; the same on all ranks but for `rank`."""

    choice: BackendChoice
    rank: int
    world_size: int
    rendezvous: str
    timeout_s: float
    sizes_bytes: tuple[int, ...]


def run_rank(channel: Channel, task: RankTask) -> None:
    """Tells in turn: "loaded", "joined", then one outcome of each `rounds`; "error" ends it early."""
    try:
        backend = load_backend(task.choice.name, task.choice.options)
    except MeshError as error:
        channel.send(usage_error(error) or {"error": describe_error(error)})
        return
    channel.send({"loaded": _introduce(task, backend)})
    if backend.collectives is None:
        return
    try:
        _run_group(channel, task, backend, backend.collectives)
    except MeshError as error:
        channel.send({"error": describe_error(error)})


def rounds(
    declared: list[str], algorithms: list[str], sizes_bytes: tuple[int, ...]
) -> Iterator[tuple[str, int, str]]:
    """(primitive, size in bytes, algorithm) in the order in which every rank runs them. algorithm "": as the
    plugin chooses; all_reduce is run by each of several before.
    """
    for name in PRIMITIVES:
        if name in declared:
            several = algorithms if name == ALL_REDUCE and len(algorithms) > 1 else []
            yield from ((name, size, each) for size in sizes_bytes for each in (*several, ""))
    if BARRIER in declared:
        yield BARRIER, 0, ""


def _introduce(task: RankTask, backend: Backend) -> dict[str, Any]:
    library = backend.collectives.library if backend.collectives is not None else None
    return {
        "identity": identity_of(read_info(task.choice.name, backend), backend),
        "library": library,
        "declared": list(backend.capabilities().collectives),
        "algorithms": list(backend.collectives.algorithms()) if backend.collectives is not None else [],
        "devices": len(backend.devices.list_devices()),
        "shares_host_memory": backend.devices.shares_host_memory,
    }


def _run_group(channel: Channel, task: RankTask, backend: Backend, collectives: Collectives) -> None:
    # Its device is chosen before the group, which some libraries bind to the device of its ranks.
    backend.create_runner(RunnerContext(device=task.rank % len(backend.devices.list_devices())))
    collectives.init_group(
        GROUP,
        rank=task.rank,
        world_size=task.world_size,
        rendezvous=task.rendezvous,
        timeout_s=task.timeout_s,
    )
    channel.send({"joined": True})
    try:
        declared, algorithms = list(backend.capabilities().collectives), list(collectives.algorithms())
        for number, (name, size, algorithm) in enumerate(rounds(declared, algorithms, task.sizes_bytes)):
            if name == BARRIER:
                channel.send({"outcome": _barrier(task, collectives)})
                continue
            primitive = by_algorithm(algorithm) if algorithm else PRIMITIVES[name]
            one = _Round(task, backend, collectives, primitive, size, root=number % task.world_size)
            taken = algorithm or (collectives.algorithm(GROUP, size) if name == ALL_REDUCE else "")
            channel.send({"outcome": {**backend.execute_runnable(one.run), "algorithm": taken}})
    finally:
        collectives.destroy_group(GROUP)


def _barrier(task: RankTask, collectives: Collectives) -> dict[str, Any]:
    """When this rank came and left, on the clock that all processes of a host share."""
    durations = []
    for _ in range(_calls(0)):
        start = time.monotonic()
        collectives.barrier(GROUP)
        durations.append(time.monotonic() - start)
    time.sleep(_STAGGER_S * task.rank)
    came = time.monotonic()
    collectives.barrier(GROUP)
    return {"durations_s": durations, "wrong": "", "came_s": came, "left_s": time.monotonic()}


@dataclass(frozen=True)
class _Round:
    """One primitive at one size."""

    task: RankTask
    backend: Backend
    collectives: Collectives
    primitive: Primitive
    size_bytes: int
    root: int

    def run(self) -> dict[str, Any]:
        """Durations of each timed call in seconds, and what was wrong ("": nothing)."""
        inputs = [partial(self._input, rank) for rank in range(self.task.world_size)]
        mine = self._input(self.task.rank)
        expected = self.primitive.expected(self.task.rank, self.root, inputs)
        sent = self._upload(mine)
        first, _ = self._call(sent)
        wrong = find_difference(expected, self._download(first))
        self.collectives.barrier(GROUP)
        last, durations = first, []
        for _ in range(_calls(self.size_bytes)):
            last, duration = self._call(sent)
            durations.append(duration)
        wrong = wrong or find_difference(expected, self._download(last))
        if not wrong and find_difference(mine, self._download(sent)):
            wrong = "the input was overwritten"
        return {"durations_s": durations, "wrong": wrong}

    def _call(self, sent: Any) -> tuple[Any, float]:
        start = time.monotonic()
        received = self.primitive.call(self.collectives, GROUP, sent, self.root)
        self.backend.devices.synchronize(self._device)
        return received, time.monotonic() - start

    def _input(self, rank: int) -> Array:
        return self.primitive.input_of(rank, self.task.world_size, self.size_bytes)

    def _upload(self, values: Array) -> Any:
        return self.backend.memory.upload(encode(values, "float32"), self._device)

    def _download(self, tensor: Any) -> Array:
        return decode(self.backend.memory.download(tensor)).astype("float32")

    @property
    def _device(self) -> int:
        """A device of its own; ranks of a host's plugin may share one."""
        return self.task.rank % len(self.backend.devices.list_devices())


def _calls(size_bytes: int) -> int:
    """Timed calls at a size: many where one is short."""
    if size_bytes <= 1 << 16:
        return 10
    return 5 if size_bytes <= 1 << 22 else 3
