"""The ranks of a run as seen from their parent: all of them answer each phase, or are named."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from plugins.verification.rank import RankTask, run_rank
from plugins.verification.request import BackendChoice, raise_usage_error
from plugins.verification.spawned import Message, ProcessDied, ProcessSilent, Spawned

_GRACE_S = 5.0
"""Ranks end a wait by themselves and name who is missing; this much later their parent ends it."""


@dataclass(frozen=True)
class GroupShape:
    """How a run is made up. `absent`: the rank that is left out, or None."""

    world_size: int
    sizes_bytes: tuple[int, ...]
    timeout_s: float
    absent: int | None = None


class RanksFailed(Exception):
    """Not all ranks came through a phase; the text names them."""


class RankGroup:
    """Starts every rank but the absent one; on leaving the `with` block none is left running."""

    def __init__(self, choice: BackendChoice, shape: GroupShape, folder: Path) -> None:
        self._shape = shape
        self._stack = ExitStack()
        self._ranks: dict[int, Spawned] = {}
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            for rank in range(shape.world_size):
                if rank == shape.absent:
                    continue
                task = RankTask(
                    choice=choice,
                    rank=rank,
                    world_size=shape.world_size,
                    rendezvous=f"file://{folder}/rendezvous",
                    timeout_s=shape.timeout_s,
                    sizes_bytes=shape.sizes_bytes,
                )
                self._ranks[rank] = self._stack.enter_context(Spawned(run_rank, task))
            undo.pop_all()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def gather(self, key: str, phase: str) -> Mapping[int, Message]:
        """The next message's `key` of every running rank, by rank.

        Raises:
            RanksFailed: a rank reported an error, died or was silent too long in `phase`.
            InvalidArgument: the command line is at fault.
        """
        end = time.monotonic() + self._shape.timeout_s + _GRACE_S
        answers: dict[int, Message] = {}
        troubles: dict[int, str] = {}
        missing: set[int] = set() if self._shape.absent is None else {self._shape.absent}
        for rank, process in self._ranks.items():
            try:
                message = process.receive(max(end - time.monotonic(), 0.0))
            except (ProcessSilent, ProcessDied) as trouble:
                troubles[rank] = str(trouble)
                missing.add(rank)
                continue
            raise_usage_error(message)
            if key in message:
                answers[rank] = message[key]
            else:
                troubles[rank] = message["error"]["message"]
        if troubles:
            raise RanksFailed(_describe(troubles, missing, phase))
        return answers


def _describe(troubles: Mapping[int, str], missing: set[int], phase: str) -> str:
    """First who did not come, as the parent saw it; then what the ranks say, equal words once."""
    said: dict[str, list[int]] = {}
    for rank, text in troubles.items():
        said.setdefault(text, []).append(rank)
    words = [f"{name_ranks(ranks)}: {text}" for text, ranks in said.items()]
    came = f"{name_ranks(sorted(missing))} did not come through {phase}; " if missing else f"{phase}: "
    return came + "; ".join(words)


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
