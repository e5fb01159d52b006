"""One rank of the collective checks: `python -m plugins.conformance.collective_rank ORDER`, ORDER as JSON.

Inputs are small whole numbers: their sums are exact in every dtype, so results have to be equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugins.conformance.collective_sums import Sums
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.collectives import ASYNC_ALL_REDUCE, Collectives
from plugins.sdk.registry import load_backend
from plugins.sdk.tensors import HostTensor

GROUP = "conformance"
_TIMEOUT_S = 60.0
_SHAPES = ((2,), (6, 3), (1 << 14,))
"""A pair, an odd row, and beyond what is sent in one piece; first sizes divide by the number of ranks."""
_CONTRACT_FLOATS = ("float32", "bfloat16", "float16")


Outcome = Mapping[str, str]
"""Primitive -> what was wrong with it on this rank; "" where nothing was."""


def check_rank(
    backend: Backend,
    primitives: Sequence[str],
    *,
    rank: int,
    world_size: int,
    rendezvous: str,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> dict[str, str]:
    """The outcome of all primitives, in order. tell: gets the outcome so far after each.

    Raises:
        MeshError: the group cannot be joined, or another rank was lost.
    """
    collectives = backend.collectives
    if collectives is None:
        raise ValueError("the back end has no collectives")
    # A rank works on a device of its own where there are as many: some libraries refuse two ranks on one.
    device = rank % len(backend.devices.list_devices())
    backend.create_runner(RunnerContext(device=device))
    collectives.init_group(
        GROUP, rank=rank, world_size=world_size, rendezvous=rendezvous, timeout_s=_TIMEOUT_S
    )
    try:
        rank_of = _Rank(backend, collectives, rank, world_size, device=device, rendezvous=rendezvous)
        outcome: dict[str, str] = {}
        for primitive in primitives:
            outcome[primitive] = rank_of.problem(primitive)
            tell(outcome)
        return outcome
    finally:
        for _ in range(10):  # idempotent
            collectives.destroy_group(GROUP)


class _Rank:
    """Runs primitives with inputs that every rank can work out for all ranks."""

    def __init__(
        self,
        backend: Backend,
        collectives: Collectives,
        rank: int,
        world_size: int,
        *,
        device: int,
        rendezvous: str,
    ) -> None:
        self._backend = backend
        self._collectives = collectives
        self._rank = rank
        self._device = device
        self._world = range(world_size)
        self._sums = Sums(
            collectives,
            GROUP,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            send=self._upload,
            receive=self._download,
        )

    def problem(self, primitive: str) -> str:
        """ "" where it does what its definition says."""
        if primitive == "barrier":
            for _ in range(3):
                self._collectives.barrier(GROUP)
            return ""
        report = self._backend.capabilities()
        dtypes = [name for name in report.compute_dtypes if name in _CONTRACT_FLOATS] or ["float32"]
        if primitive == ASYNC_ALL_REDUCE:
            found = (self._sums.begun_sums(dtype) for dtype in dtypes)
            return next(filter(None, found), "") or self._sums.begins_alone()
        for dtype in dtypes:
            for shape in _SHAPES:
                if problem := self._problem_of(primitive, dtype, shape):
                    return problem
        return self._problem_of_sums(dtypes) if primitive == "all_reduce" else ""

    def _problem_of_sums(self, dtypes: Sequence[str]) -> str:
        problem = ""
        if "all_gather" in self._backend.capabilities().collectives:
            problem = next(filter(None, map(self._sums.unequal_bits, dtypes)), "")
        return problem or self._sums.absent_rank()

    def _problem_of(self, primitive: str, dtype: str, shape: tuple[int, ...]) -> str:
        for expected, call in self._calls(primitive, shape):
            sent = _input(self._rank, shape, dtype)
            mine = self._upload(sent)
            received = self._download(call(mine))
            what = f"{primitive} of {dtype} {list(shape)}"
            if received.shape != expected.shape or received.dtype != sent.dtype:
                return f"{what}: gave {received.dtype} {list(received.shape)}, not {list(expected.shape)}"
            wrong = int((received.double() != expected).sum())
            if wrong:
                return f"{what}: {wrong} of {expected.numel()} elements are wrong"
            if not torch.equal(self._download(mine), sent):
                return f"{what}: the input was overwritten"
        return ""

    def _calls(self, primitive: str, shape: tuple[int, ...]) -> list[tuple[Tensor, Callable[[Tensor], Any]]]:
        """Pairs of what is expected in float64 and the call that is to give it."""
        inputs = torch.stack([_input(rank, shape, "float64") for rank in self._world])
        collectives = self._collectives
        if primitive == "all_reduce":
            return [
                (inputs.sum(dim=0), lambda mine: collectives.all_reduce(GROUP, mine)),
                (inputs.sum(dim=0), lambda mine: collectives.begin_all_reduce(GROUP, mine).wait()),
            ]
        if primitive == "all_gather":
            return [(inputs, lambda mine: collectives.all_gather(GROUP, mine))]
        if primitive == "reduce_scatter":
            part = inputs.sum(dim=0).chunk(len(self._world))[self._rank]
            return [(part, lambda mine: collectives.reduce_scatter(GROUP, mine))]
        return [(inputs[root], self._broadcast_from(root)) for root in self._world]

    def _broadcast_from(self, root: int) -> Callable[[Tensor], Any]:
        return lambda mine: self._collectives.broadcast(GROUP, mine, root=root)

    def _upload(self, value: Tensor) -> Any:
        raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return self._backend.memory.upload(HostTensor(dtype, tuple(value.shape), raw), self._device)

    def _download(self, value: Any) -> Tensor:
        held = self._backend.memory.download(value)
        dtype: torch.dtype = getattr(torch, held.dtype)
        return torch.frombuffer(bytearray(held.data), dtype=torch.uint8).view(dtype).reshape(held.shape)


def _input(rank: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 7 + 3 * rank) % 31 - 11 + 20 * rank
    return values.reshape(shape).to(getattr(torch, dtype))


def main() -> int:
    """Do what the order says and write the outcome so far to its result file; an error is an outcome too."""
    order = json.loads(sys.argv[1])
    result = Path(order["result"])
    outcome: Outcome = {}

    def tell(so_far: Outcome) -> None:
        nonlocal outcome
        outcome = so_far
        unfinished = result.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(so_far))
        unfinished.replace(result)  # in one step: the parent may read at any time

    try:
        check_rank(
            load_backend(order["backend"], order["options"]),
            order["primitives"],
            rank=order["rank"],
            world_size=order["world_size"],
            rendezvous=order["rendezvous"],
            tell=tell,
        )
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the outcome that is reported
        tell({**outcome, "error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
