"""`chipmesh tune`: from its flags to what was found, written and shown."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from meshkit.cli.state import require_endpoint, state_dir_from_environment
from meshkit.cli.terminal import EXIT_OK, print_json
from meshkit.cli.tuning.display import (
    TuneDisplay,
    describe_outcome,
    print_outcome,
    usage_text,
    verdict_text,
)
from meshkit.cli.tuning.groups_file import write_group
from meshkit.cli.tuning.plot import save_plot
from meshkit.cli.tuning.request import TuneRequest, make_axes, read_request
from meshkit.cli.tuning.sites import OwnMesh, RunningGroup, Site
from meshkit.cli.tuning.space import DEFAULT, Setting
from meshkit.cli.tuning.taken_group import Ceilings, TakenGroup
from meshkit.cli.tuning.tuner import Measure, Outcome, Report, Tuner
from meshkit.load.settings import BenchSettings


def tune(flags: Mapping[str, Any], *, endpoint: str | None, tls: Path | None, as_json: bool) -> int:
    """Search, write, tell. endpoint, tls: of the scheduler of a running mesh.

    Raises:
        MeshError: a flag; a mesh that does not start or answer; a load that fails on the default itself.
        KeyboardInterrupt: after Ctrl-C or SIGTERM. All settings are what they were, and nothing is written.
    """
    request = read_request(flags)
    with _terminated_as_interrupted(), TuneDisplay(request.objective) as display:
        site = _make_site(request, display, endpoint=endpoint, tls=tls)
        if request.own is None:
            display.say(f"group {request.name} is taken over: its ceilings change, its cached prefixes go")
        try:
            outcome, default = run_search(request, site, display)
        except KeyboardInterrupt:
            display.say("interrupted: settings are what they were, nothing is written")
            raise
    _write(request, outcome, default)
    if as_json:
        print_json(describe(request, outcome, default))
    else:
        print_outcome(outcome, request.objective)
        _print_next(request, outcome)
    return EXIT_OK


def run_search(request: TuneRequest, site: Site, display: TuneDisplay) -> tuple[Outcome, Ceilings]:
    """The outcome, and what the default came to. Whatever happens, the site is closed."""
    chosen: Setting | None = None
    try:
        site.open()
        default = site.group.effective
        tuner = Tuner(
            make_measure(request, site, on_done=display.sample),
            objective=request.objective,
            rounds=request.rounds,
            budget_s=request.budget_s,
            watcher=display,
        )
        outcome = tuner.run(
            lambda: make_axes(
                request.tried,
                request.load,
                site.group,
                can_grow=site.can_grow,
                has_windows=site.has_windows,
            )
        )
        chosen = outcome.chosen if request.keep else None
    finally:
        site.close(chosen)
    return outcome, default


def make_measure(request: TuneRequest, site: Site, *, on_done: Callable[[Any], None]) -> Measure:
    """Applies a setting, empties the prefix cache, runs the load: the same prompts each time.

    Once before it returns the load is run in small on the default, since the first run of all is cold.
    """
    import uvloop  # noqa: PLC0415 - and the load driver: only where something is measured

    from meshkit.load.bench import run_bench  # noqa: PLC0415

    def apply(setting: Setting) -> BenchSettings:
        is_cold = site.apply(setting)
        load = request.load.model_copy(update={"gateway": site.gateway, "model": site.group.model})
        if is_cold:
            few = {"num_prompts": min(load.prompts, load.concurrency)}
            uvloop.run(run_bench(load.model_copy(update=few)))
        site.group.flush()
        return load

    def measure(setting: Setting) -> Report:
        return uvloop.run(run_bench(apply(setting), on_done=on_done)).report

    apply(DEFAULT)
    return measure


def describe(request: TuneRequest, outcome: Outcome, default: Ceilings) -> dict[str, Any]:
    """All of it, for --json."""
    verdict = outcome.verdict
    return {
        "objective": request.objective.value,
        "group": request.name,
        "load": request.load.model_dump(
            mode="json", exclude={"api_key", "gateway", "authority"}, exclude_none=True
        ),
        "default": {
            "chunked_prefill_size": default.chunk_tokens,
            "max_running_requests": default.max_running_requests,
        },
        "settings": describe_outcome(outcome, request.objective),
        "best": asdict(outcome.best),
        "rounds": [asdict(pair) for pair in outcome.rounds],
        "accepted": verdict.accepted,
        "gain": round(verdict.gain, 4) if math.isfinite(verdict.gain) else None,
        "noise": round(verdict.noise, 4),
        "reason": verdict_text(outcome),
        "chosen": asdict(outcome.chosen),
        "seconds": round(sum(run.took_s for run in outcome.runs), 1),
        "output": str(request.output) if request.output is not None else None,
        "plot": str(request.plot) if request.plot is not None else None,
    }


def _make_site(request: TuneRequest, display: TuneDisplay, *, endpoint: str | None, tls: Path | None) -> Site:
    if request.own is not None:
        return OwnMesh(request.own.group, request.own.options, report=display.launch)
    scheduler = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    return RunningGroup(TakenGroup(scheduler, request.name, tls=tls), gateway=str(request.load.gateway))


def _write(request: TuneRequest, outcome: Outcome, default: Ceilings) -> None:
    if request.output is not None:
        group = request.own.group if request.own is not None else None
        write_group(request.output, outcome.chosen, name=request.name, group=group)
    if request.plot is not None:
        places = {
            "chunked_prefill_size": float(default.chunk_tokens),
            "max_running_requests": float(default.max_running_requests),
        }
        rows = describe_outcome(outcome, request.objective)
        title = f"{request.name}: {request.objective.value}, 1 is the default"
        save_plot(request.plot, rows, default=places, title=title)


def _print_next(request: TuneRequest, outcome: Outcome) -> None:
    if request.own is None and request.keep:
        print(f"group {request.name} goes on with {outcome.chosen}; a restart of the mesh forgets that")
    if request.output is not None:
        print(f"written to {request.output}; use it:\n  {usage_text(str(request.output))}")
    elif request.own is not None:
        print("nothing written: --output FILE makes a groups file of it for `chipmesh up --groups-file`")
    sys.stdout.flush()


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a search as Ctrl-C does, in order."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
