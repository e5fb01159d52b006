"""A rank's links to the others of its set, over the collectives of a plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from meshkit.errors import DeadlineExceeded, FailedPrecondition, MeshError, Unavailable
from meshkit.modelstore.sharding import ParallelLayout, RankPlace
from plugins.sdk.backend import Backend
from plugins.sdk.collectives import Collectives, Pending
from plugins.sdk.runner import ParallelOptions
from plugins.sdk.timing import StopTiming
from worker_svc.timed_collectives import TimedCollectives

T = TypeVar("T")

WORLD = "world"
_NEEDED = ("all_reduce", "all_gather", "broadcast")


class Ranks:
    """The links of one rank (worker_svc.parallel.links), and what the runner exchanges with the others.

    Every rank makes the same calls in the same order, on the thread and under the settings that the chip's
    work runs under. Until `enter_steps` each waits for the others as long as for their joining, since ranks
    read their weights and compile at their own pace. Every call raises DeadlineExceeded (RANKS_MISSING) or
    Unavailable (RANK_LOST), whose text and `missing` name ranks of the set.
    """

    def __init__(
        self,
        collectives: Collectives,
        options: ParallelOptions,
        *,
        device: torch.device,
        piece_rows: int = 0,
        sees_overlap: bool = True,
    ) -> None:
        """device: where tensors that are made here are kept. piece_rows: as CapabilityReport.overlap_rows.
        sees_overlap: as TimedCollectives.
        """
        self.place = ParallelLayout(options.tensor, options.pipeline).place(options.rank)
        self.piece_rows = piece_rows
        self._timed = TimedCollectives(collectives, sees_overlap=sees_overlap)
        self._collectives = self._timed.collectives
        self._options = options
        self._device = device
        self._groups = groups_of(self.place)
        self._timeout_s = options.join_timeout_s
        self._has_left = False
        self._tensor_group = tensor_group(self.place.stage)

    def __repr__(self) -> str:
        return f"<Ranks {self.place.rank} of {self.place.layout.world_size}>"

    @property
    def samples(self) -> bool:
        """Whether this rank chooses the tokens of the set: the first one of the last stage."""
        return self.place.rank == self._sampling_rank

    def join(self) -> None:
        """Meet the others. Leaves what it has joined where it fails."""
        try:
            for name, members in self._groups.items():
                self._run(name, partial(self._join, name, members))
        except BaseException:
            self.close()
            raise

    def enter_steps(self) -> None:
        """From now on ranks are expected within the time of a step."""
        self._timeout_s = self._options.step_timeout_s

    def start_timing(self, *, most_runs: int) -> StopTiming:
        """Time what is exchanged from now on."""
        return self._timed.start(most_runs=most_runs)

    def close(self) -> None:
        """Leave all groups; ranks that wait for this one learn of it. Idempotent."""
        self._has_left = True
        for name in reversed(self._groups):
            self._collectives.destroy_group(name)

    def begin_sum(self, x: Tensor) -> Pending:
        """As RankLinks says."""
        name, timeout_s = self._tensor_group, self._timeout_s
        begun = self._run(name, lambda: self._collectives.begin_all_reduce(name, x, timeout_s=timeout_s))
        return _OfSet(begun, lambda wait: self._run(name, wait))

    def gather(self, x: Tensor) -> Tensor:
        """As RankLinks says."""
        return self._gather(self._tensor_group, x, self._timeout_s)

    def send(self, x: Tensor) -> None:
        """As RankLinks says."""
        self._broadcast(pair_group(self.place.stage, self.place), x, 0)

    def receive(self, like: Tensor) -> Tensor:
        """As RankLinks says."""
        return self._broadcast(pair_group(self.place.stage - 1, self.place), like, 0)

    def share_choice(self, values: Tensor) -> Tensor:
        """What the sampling rank has in `values`; the others' give the form."""
        return self._broadcast(WORLD, values.to(self._device), self._sampling_rank)

    def exchange(self, text: str) -> tuple[str, ...]:
        """What each rank said, by rank. Waits as for joining: ranks come to it from work of their own."""
        data = bytearray(text.encode())
        lengths = self._gather_numbers(torch.tensor([len(data)])).flatten().tolist()
        if not any(lengths):
            return ("",) * len(lengths)
        padded = torch.frombuffer(data.ljust(max(lengths), b"\0"), dtype=torch.uint8)
        rows = self._gather_numbers(padded)
        return tuple(bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True))

    @property
    def _sampling_rank(self) -> int:
        layout = self.place.layout
        return layout.world_size - layout.tensor

    def _join(self, name: str, members: Sequence[int]) -> None:
        self._collectives.init_group(
            name,
            rank=members.index(self.place.rank),
            world_size=len(members),
            rendezvous=self._options.rendezvous,
            timeout_s=self._options.join_timeout_s,
        )

    def _gather_numbers(self, values: Tensor) -> Tensor:
        """Of all ranks, on the host."""
        return self._gather(WORLD, values.to(self._device), self._options.join_timeout_s).cpu()

    def _gather(self, name: str, x: Tensor, timeout_s: float) -> Tensor:
        gathered: Tensor = self._run(name, lambda: self._collectives.all_gather(name, x, timeout_s=timeout_s))
        return gathered

    def _broadcast(self, name: str, x: Tensor, root: int) -> Tensor:
        timeout_s = self._timeout_s
        sent: Tensor = self._run(
            name, lambda: self._collectives.broadcast(name, x, root=root, timeout_s=timeout_s)
        )
        return sent

    def _run(self, name: str, call: Callable[[], T]) -> T:
        if self._has_left:
            raise Unavailable(
                f"rank {self.place.rank} has left its set after an error; load the model again on all ranks",
                reason="RANK_LOST",
                missing=self.place.rank,
            )
        try:
            return call()
        except (DeadlineExceeded, Unavailable) as error:
            raise _of_set(error, name, self._groups[name], self.place.rank) from error


class _OfSet(Pending):
    """A sum under way whose errors name ranks of the set."""

    def __init__(self, begun: Pending, run: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        self._begun, self._run = begun, run

    def wait(self) -> Tensor:
        """As Pending says."""
        return self._run(self._begun.wait)


def tensor_group(stage: int) -> str:
    """Name of the group of the ranks that share a stage's layers."""
    return f"tensor/{stage}"


def pair_group(stage: int, place: RankPlace) -> str:
    """Name of the group of two ranks, this one's tensor rank in `stage` and in the next."""
    return f"pair/{stage}/{place.tensor_rank}"


def groups_of(place: RankPlace) -> dict[str, tuple[int, ...]]:
    """The groups that a rank is in, with their members by rank in the set, in the order of joining."""
    layout, stage = place.layout, place.stage
    groups = {WORLD: tuple(range(layout.world_size))}
    if layout.tensor > 1:
        first = stage * layout.tensor
        groups[tensor_group(stage)] = tuple(range(first, first + layout.tensor))
    for sender in (stage - 1, stage):
        if 0 <= sender < layout.pipeline - 1:
            rank = sender * layout.tensor + place.tensor_rank
            groups[pair_group(sender, place)] = (rank, rank + layout.tensor)
    return groups


def require_collectives(backend: Backend, options: ParallelOptions) -> Collectives:
    """What the ranks of a set are linked by.

    Raises:
        FailedPrecondition: (tensor_parallel_size or pipeline_parallel_size) the chip works alone, or its
            report lacks a primitive.
    """
    report, collectives = backend.capabilities(), backend.collectives
    missing = [name for name in _NEEDED if collectives is None or name not in report.collectives]
    if collectives is not None and not missing:
        return collectives
    split = "tensor" if options.tensor > 1 else "pipeline"
    field, size = f"{split}_parallel_size", getattr(options, split)
    raise FailedPrecondition(
        f"{field} is {size}, and chip {report.chip!r} has no {', '.join(missing)} to link its ranks by; "
        "run one rank, or choose another chip",
        field=field,
        reason="NO_COLLECTIVES",
    )


def _of_set(error: MeshError, name: str, members: Sequence[int], own: int) -> MeshError:
    """The same error, its ranks numbered as in the set."""
    within = [int(each) for each in error.metadata.get("missing", "").split(", ") if each]
    ranks = [members[each] for each in within] or [each for each in members if each != own]
    if error.metadata.get("meeting_point") == "lost":
        ranks = [0]  # which held it for all groups, also for those that it is not in
    named = ", ".join(map(str, ranks))
    late = isinstance(error, DeadlineExceeded)
    what = "did not come in time" if late else "was lost"
    listed = ", ".join(map(str, members))
    return type(error)(
        f"rank {named} of the set {what}; in group {name!r} of ranks {listed}: {error.message}",
        reason="RANKS_MISSING" if late else "RANK_LOST",
        missing=named,
        group=name,
    )
