"""A search on a terminal: a bar with the best so far on stderr, or a line per run elsewhere; then a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from meshkit.cli.events import LaunchEvent
from meshkit.cli.mesh_status import TABLE_WIDTH
from meshkit.cli.terminal import own_command
from meshkit.cli.tuning.objective import Objective
from meshkit.cli.tuning.search import Trial, adjust
from meshkit.cli.tuning.space import DEFAULT, Setting
from meshkit.cli.tuning.tuner import Outcome, Run
from meshkit.load.sample import Sample


class TuneDisplay:
    """A Watcher. Enter it around the search."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, note="")
        self._begun_s = time.monotonic()
        self._runs = 0
        self._all: list[Run] = []
        self._best = ""
        self._left = ""

    def __enter__(self) -> TuneDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def launch(self, event: LaunchEvent) -> None:
        """An event of a mesh's start."""
        if event.kind == "progress":
            self._note(f"{event.service}: {event.stage} {event.fraction:.0%}")
        elif event.kind in ("started", "ready", "stopping"):
            self._note(f"{event.service} {event.kind}")

    def begin(self, phase: str, setting: Setting, *, trials_ahead: int, left_s: float) -> None:
        """See Watcher."""
        self._runs += 1
        elapsed_s = time.monotonic() - self._begun_s
        self._left = f"{left_s:.0f} s left" if trials_ahead else ""
        self._progress.update(
            self._task,
            description=f"{phase} {self._runs}: {setting}",
            completed=elapsed_s,
            total=elapsed_s + max(left_s, 1.0),
        )
        self._note("")

    def sample(self, sample: Sample) -> None:
        """A request has ended."""
        del sample
        self._progress.update(self._task, completed=time.monotonic() - self._begun_s)

    def end(self, run: Run, *, best: Setting) -> None:
        """See Watcher."""
        self._all.append(run)
        adjusted = adjust(trials_of(self._all, self._objective))
        usual = adjusted.get(DEFAULT)
        share = f" ({adjusted[best] / usual:.2f} of the default)" if usual and best in adjusted else ""
        self._best = f"best so far: {best}{share}" if best != DEFAULT else "best so far: the default"
        if not self._console.is_terminal:
            told = run.error or f"{self._objective.figure(run.report or {}):.5g} {self._objective.unit}"
            text = f"{run.phase} {self._runs}: {run.setting}: {told}; {self._best}"
            self._console.print(text, markup=False, soft_wrap=True)

    def _note(self, now: str) -> None:
        told = "; ".join(part for part in (now, self._best, self._left) if part)
        self._progress.update(self._task, note=told)


def describe_outcome(outcome: Outcome, objective: Objective) -> list[dict[str, Any]]:
    """A row for each setting, the best first: its runs, medians of their figures, and its share of the
    default's score beside it (None where it failed).
    """
    trials = trials_of(outcome.runs, objective)
    adjusted = adjust(trials)
    settings = list(dict.fromkeys(run.setting for run in outcome.runs))
    rows = [_describe(setting, outcome.runs, objective) for setting in settings]
    usual = adjusted.get(DEFAULT)
    for setting, row in zip(settings, rows, strict=True):
        score = adjusted.get(setting)
        row["of_default"] = None if score is None or not usual else round(score / usual, 4)
    return sorted(rows, key=lambda row: -(row["of_default"] or 0.0))


def trials_of(runs: Sequence[Run], objective: Objective) -> list[Trial]:
    """The runs as the search reads them."""
    return [
        Trial(run.setting, None)
        if run.report is None
        else Trial(run.setting, objective.score(run.report), objective.floor(run.report))
        for run in runs
    ]


def print_outcome(outcome: Outcome, objective: Objective) -> None:
    """The table and the verdict, on stdout."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    table = Table(box=None, title=f"by {objective.value}")
    for column in ("setting", "runs", "tokens/s", "TTFT p50, ms", "TPOT p50, ms", "good/s", "of default"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for row in describe_outcome(outcome, objective):
        figures = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "goodput_per_s", "of_default")
        cells = ["-" if row[name] is None else f"{row[name]:.4g}" for name in figures]
        table.add_row(row["text"], str(row["runs"]), *cells)
    console.print(table)
    console.print(verdict_text(outcome), markup=False, soft_wrap=True)


def verdict_text(outcome: Outcome) -> str:
    """What was chosen and why."""
    verdict, rounds = outcome.verdict, len(outcome.rounds)
    if outcome.best == DEFAULT:
        return f"the default stays: {verdict.reason}"
    side_by_side = f"{outcome.best} beside the default, {rounds} rounds in turns: {verdict.reason}"
    return f"chosen: {side_by_side}" if verdict.accepted else f"the default stays: {side_by_side}"


def usage_text(file: str) -> str:
    """How to use what was written."""
    return f"{own_command()} up --groups-file {file}"


def _describe(setting: Setting, runs: Sequence[Run], objective: Objective) -> dict[str, Any]:
    reports = [run.report for run in runs if run.setting == setting and run.report is not None]
    errors = [run.error for run in runs if run.setting == setting and run.error]

    def median(*path: str) -> float | None:
        found = [value for report in reports if (value := _dig(report, path)) is not None]
        return round(statistics.median(found), 3) if found else None

    return {
        "text": str(setting),
        "chunked_prefill_size": setting.chunked_prefill_size,
        "max_running_requests": setting.max_running_requests,
        "step_window_s": setting.step_window_s,
        "runs": len(reports) + len(errors),
        "output_tokens_per_s": median("output_tokens_per_s"),
        "ttft_p50_ms": median("ttft_ms", "p50"),
        "tpot_p50_ms": median("tpot_ms", "p50"),
        "goodput_per_s": median("goodput", "requests_per_s"),
        objective.value: [round(objective.figure(report), 3) for report in reports],
        "error": errors[0] if errors else None,
    }


def _dig(report: Any, path: Sequence[str]) -> float | None:
    for name in path:
        report = None if report is None else report[name]
    return None if report is None else float(report)
