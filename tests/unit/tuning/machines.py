"""A machine that does not exist: what a setting scores on it, with noise and with drift."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from meshkit.cli.tuning.search import Trial, leader, make_plan, next_trial
from meshkit.cli.tuning.space import DEFAULT, Axes, Setting
from meshkit.cli.tuning.verdict import Pair, Verdict, judge

Score = Callable[[Setting], float]
AXES = Axes((32, 64, None, 256, 512), (4, None, 16), (None, 0.0, 0.05))


@dataclass
class Machine:
    """noise: standard deviation of the score's logarithm. drift: change of all scores over 100 runs."""

    score: Score
    seed: int
    noise: float = 0.0
    drift: float = 0.0
    runs: int = 0
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def measure(self, setting: Setting) -> float:
        """One run."""
        pace = 1 + self.drift * self.runs / 100
        self.runs += 1
        return self.score(setting) * pace * self._draw.lognormvariate(0, self.noise)

    def search(self, axes: Axes = AXES, *, room: int = 40) -> list[Trial]:
        """The whole search."""
        plan = make_plan(axes, room=room)
        while (setting := next_trial(plan, self.trials, room=room)) is not None:
            self.trials.append(Trial(setting, self.measure(setting)))
            room -= 1
        return self.trials

    def tune(self, *, rounds: int = 5) -> tuple[Setting, list[Pair], Verdict | None]:
        """(chosen, rounds side by side, verdict)."""
        best = leader(self.search())
        if best == DEFAULT:
            return DEFAULT, [], None
        pairs = []
        for number in range(rounds):
            order = (DEFAULT, best) if number % 2 == 0 else (best, DEFAULT)
            scores = {setting: self.measure(setting) for setting in order}
            pairs.append(Pair(scores[DEFAULT], scores[best]))
        verdict = judge(pairs)
        return best if verdict.accepted else DEFAULT, pairs, verdict


def flat(setting: Setting) -> float:
    """Nothing makes a difference."""
    del setting
    return 100.0


def peaked(setting: Setting) -> float:
    """Best at a chunk of 256 and 16 at once; the window makes no difference."""
    chunk = {32: 0.7, 64: 0.9, None: 1.0, 256: 1.2, 512: 1.1}[setting.chunked_prefill_size]
    batch = {4: 0.6, None: 1.0, 16: 1.3}[setting.max_running_requests]
    return 100.0 * chunk * batch
