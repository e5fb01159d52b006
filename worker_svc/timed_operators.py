"""A model's operators with a clock beside each, which stands still until somebody profiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from plugins.sdk.operator_table import BoundOperator, OperatorTable
from plugins.sdk.planning import RUNS_ON_CHIP
from plugins.sdk.runner import OperatorDecision
from plugins.sdk.timing import OperatorTimes, StopTiming, TimedOperator, TimingLog, class_of

NOTE = (
    "operators were timed one by one, each waited for until the chip had ended it: steps took longer than "
    "they do unwatched, and work that overlaps was not seen to"
)


class TimedOperators:
    """Binds what `table` binds; `start` has the calls timed from then on.

    wait: returns when the chip has ended all its work. backend: name of the plugin.
    """

    def __init__(self, table: OperatorTable, *, wait: Callable[[], None], backend: str) -> None:
        self._table = table
        self._wait = wait
        self._backend = backend
        self._switches: list[_Switch] = []

    def __repr__(self) -> str:
        return f"<TimedOperators {len(self._switches)} calls>"

    def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
        """As OperatorBinder says."""
        bound = self._table.bind(name, where, **sizes)
        switch = _Switch(bound.call, self._describe(name, where, sizes))
        self._switches.append(switch)
        return BoundOperator(bound.name, bound.where, switch.entry, bound.place)

    def start(self, *, most_runs: int) -> StopTiming:
        """Time all calls from now on."""
        log = TimingLog(most_runs)
        for switch in self._switches:
            switch.point_at(self._timed(switch.direct, switch.operator, log))

        def stop() -> OperatorTimes:
            for switch in self._switches:
                switch.point_at(switch.direct)
            return log.times(notes=[NOTE] if log.runs else [])

        return stop

    def _timed(
        self, direct: Callable[..., Any], operator: TimedOperator, log: TimingLog
    ) -> Callable[..., Any]:
        wait, clock = self._wait, time.monotonic

        def call(*inputs: Any, **named: Any) -> Any:
            wait()  # What was begun before is not this one's.
            begun = clock()
            outcome = direct(*inputs, **named)
            wait()
            log.add(operator, begun, clock() - begun)
            return outcome

        return call

    def _describe(self, name: str, where: str, sizes: Mapping[str, int]) -> TimedOperator:
        decision = _decision(self._table.decisions, name, sizes)
        native = decision is None or decision.choice in RUNS_ON_CHIP
        program = f"plugin {self._backend}" if native else f"{_choice(decision)}, by torch"
        return TimedOperator(name, class_of(name, f".{where}."), native, program)


class _Switch:
    """One place of the model. entry: what the model calls, and all that it costs while nobody profiles.

    A `partial` of nothing is called at the speed of C (some 20 ns, where a method of ours takes 170), and it
    can be pointed elsewhere, which unpickling does as well.
    """

    __slots__ = ("direct", "entry", "operator")

    def __init__(self, direct: Callable[..., Any], operator: TimedOperator) -> None:
        self.direct = direct
        self.operator = operator
        self.entry: partial[Any] = partial(direct)

    def point_at(self, call: Callable[..., Any]) -> None:
        """What is called from now on."""
        self.entry.__setstate__((call, (), {}, {}))  # type: ignore[attr-defined]  # not in typeshed


def _decision(
    decisions: Sequence[OperatorDecision], name: str, sizes: Mapping[str, int]
) -> OperatorDecision | None:
    """The plan's for a call site; the page size S is the plan's own."""
    wanted = {symbol: size for symbol, size in sizes.items() if symbol != "S"}
    for each in decisions:
        own = {symbol: size for symbol, size in each.sizes.items() if symbol != "S"}
        if each.name == name and own == wanted:
            return each
    return None


def _choice(decision: OperatorDecision | None) -> str:
    return "" if decision is None else decision.choice
