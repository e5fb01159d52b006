"""What a profile is told of the inside of steps: which operator ran when, of which class, by whose program.

No torch. Times are seconds of the monotonic clock (`time.monotonic`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

ATTENTION, LINEAR, MLP, NORM, ROPE = "attention", "linear", "mlp", "norm", "rope"
EMBEDDING, SAMPLING, COMMUNICATION, COPY = "embedding", "sampling", "communication", "copy"
CLASSES = (ATTENTION, LINEAR, MLP, NORM, ROPE, EMBEDDING, SAMPLING, COMMUNICATION, COPY)
"""Classes of operators. mlp: the feed-forward part, dense or of experts, its products included."""

_CLASS_OF: Mapping[str, str] = {
    "embedding": EMBEDDING,
    "linear": LINEAR,
    "linear_w8a8": LINEAR,
    "linear_w4a16": LINEAR,
    "rms_norm": NORM,
    "add_rms_norm": NORM,
    "rotary": ROPE,
    "qkv_rotary": LINEAR,
    "silu_mul": MLP,
    "write_kv": COPY,
    "attention_prefill": ATTENTION,
    "attention_decode": ATTENTION,
    "gelu_mul": MLP,
    "attention_prefill_bounded": ATTENTION,
    "attention_decode_bounded": ATTENTION,
    "argmax": SAMPLING,
    "sample": SAMPLING,
    "moe_route": MLP,
    "moe_experts": MLP,
    "moe_experts_w8a8": MLP,
    "moe_experts_w4a16": MLP,
}


def class_of(operator: str, where: str = "") -> str:
    """The class of an operator of the catalogue at a place of a model.

    Raises:
        KeyError: it has none yet.
    """
    kind = _CLASS_OF[operator]
    return MLP if kind == LINEAR and ".mlp." in where else kind


@dataclass(frozen=True, slots=True)
class TimedOperator:
    """An operator as a profile shows it.

    kind: one of CLASSES. native: whether the chip's own implementation ran. program: what carried it out, for
    people.
    """

    name: str
    kind: str
    native: bool
    program: str


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """One run. waited_s: of `seconds`, those in which the step could do nothing else; None: all of them.

    size_bytes: that a collective carried; 0 for others.
    """

    operator: TimedOperator
    begin_s: float
    seconds: float
    size_bytes: int = 0
    waited_s: float | None = None

    @property
    def held_s(self) -> float:
        """Seconds for which it held the step."""
        return self.seconds if self.waited_s is None else self.waited_s


@dataclass(frozen=True, slots=True)
class OperatorTotal:
    """All runs of one operator. seconds: for which they held steps; size_bytes: as OperatorRun."""

    operator: TimedOperator
    calls: int
    seconds: float
    size_bytes: int = 0


@dataclass(frozen=True)
class OperatorTimes:
    """All that was timed.

    runs: the first ones, in order. notes: what the numbers do not show, a sentence each.
    """

    totals: Sequence[OperatorTotal] = ()
    runs: Sequence[OperatorRun] = ()
    notes: Sequence[str] = ()


@dataclass
class _Sum:
    calls: int = 0
    seconds: float = 0.0
    size_bytes: int = 0


@dataclass
class TimingLog:
    """Takes down runs as they end, in bounded memory."""

    most_runs: int
    runs: list[OperatorRun] = field(default_factory=list)
    _sums: dict[TimedOperator, _Sum] = field(default_factory=dict)

    def add(self, operator: TimedOperator, begin_s: float, seconds: float) -> None:
        """One run has ended."""
        self.add_run(OperatorRun(operator, begin_s, seconds))

    def add_run(self, run: OperatorRun) -> None:
        """The same."""
        total = self._sums.setdefault(run.operator, _Sum())
        total.calls += 1
        total.seconds += run.held_s
        total.size_bytes += run.size_bytes
        if len(self.runs) < self.most_runs:
            self.runs.append(run)

    def times(self, *, notes: Sequence[str] = ()) -> OperatorTimes:
        """All of it."""
        totals = [
            OperatorTotal(each, total.calls, total.seconds, total.size_bytes)
            for each, total in self._sums.items()
        ]
        return OperatorTimes(totals, self.runs, notes)


def join(parts: Iterable[OperatorTimes]) -> OperatorTimes:
    """Times of several sources in one."""
    known = list(parts)
    return OperatorTimes(
        totals=[total for part in known for total in part.totals],
        runs=sorted((run for part in known for run in part.runs), key=_begin),
        notes=[note for part in known for note in part.notes],
    )


def _begin(run: OperatorRun) -> float:
    return run.begin_s


StopTiming = Callable[[], OperatorTimes]
"""Ends a timing and tells what came of it; once."""
