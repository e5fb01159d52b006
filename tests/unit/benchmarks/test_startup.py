"""Phases add up to the first token, marks are read from a worker's lines, plugins load in real processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks.startup import (
    PHASES,
    Start,
    judge,
    measure_plugin,
    process_start,
    processor_seconds,
    read_marks,
    split_phases,
    start_once,
    sum_imports,
    summarise_starts,
)
from tests.support.hash_model import write_hash_model


def log_line(event: str, second: int, **fields: Any) -> str:
    return json.dumps({"event": event, "timestamp": f"2026-01-01T00:00:{second:02}.500000Z", **fields})


def start_of(seconds: float) -> Start:
    return Start(seconds, {"command": seconds}, {"up": 0.1})


def test_phases_add_up_to_the_time_of_the_first_token() -> None:
    marks = {mark: 100.0 + 2 * index for index, mark in enumerate(PHASES.values(), start=1)}
    phases = split_phases(100.0, marks)
    assert list(phases) == list(PHASES)
    assert set(phases.values()) == {2.0}
    assert sum(phases.values()) == marks["first token"] - 100.0


def test_the_time_of_a_phase_without_a_mark_goes_to_the_next() -> None:
    phases = split_phases(10.0, {"worker process": 11.0, "plugin loaded": 14.5, "first token": 15.0})
    assert phases == {"command": 1.0, "executor_and_plugin": 3.5, "first_request": 0.5}


def test_marks_are_the_first_lines_of_their_kind_between_lines_of_others() -> None:
    marks = read_marks([
        "I1130 05:20:43.737228   14918 fork_posix.cc:71] skipping fork() handlers",
        "[1, 2]",
        log_line("Backend hash loaded successfully", 1),
        log_line("load_progress", 2, stage="weights", fraction=1.0),
        log_line("load_progress", 3, stage="first forward", fraction=0.0),
        log_line("load_progress", 4, stage="first forward", fraction=1.0),
        log_line("registered", 5),
        log_line("registered", 9),
    ])  # fmt: skip
    zero = marks["plugin loaded"]
    assert {name: at - zero for name, at in marks.items()} == {
        "plugin loaded": 0.0, "model loaded": 2.0, "model checked": 3.0, "registered": 4.0
    }  # fmt: skip


def test_imports_are_summed_by_top_package_and_by_the_parts_of_torch() -> None:
    sums = sum_imports([
        "import time: self [us] | cumulative | imported package",
        "import time:      1500 |       1500 |   numpy._core",
        "import time:       500 |       2000 | numpy",
        "import time:      3000 |       3000 |     torch._dynamo.guards",
        "import time:      1000 |       4000 |   torch",
        "a warning of somebody",
    ])  # fmt: skip
    assert dict(sums) == {"numpy": 2.0, "torch._dynamo": 3.0, "torch": 1.0}


def test_the_summary_is_the_median_start_and_the_goals_are_judged_by_it() -> None:
    starts = [start_of(7.0), start_of(4.0), start_of(5.0)]
    summary = summarise_starts(starts)
    assert summary["first_token_s"] == 5.0
    assert summary["phases_s"] == {"command": 5.0}
    assert [run["first_token_s"] for run in summary["runs"]] == [7.0, 4.0, 5.0]
    goals = judge(
        starts, {"a": {"plugin_load_ms": 301.0}, "b": {"plugin_load_ms": 300.0}, "c": {"skipped": "no"}}
    )
    assert goals["first_token_s"]["holds"] is True
    assert goals["plugin_load_ms"]["holds"] == {"a": False, "b": True}


def test_a_process_start_is_known_to_a_hundredth_and_its_time_to_a_tick() -> None:
    assert process_start(os.getpid()) <= time.time()
    assert process_start(os.getppid()) <= process_start(os.getpid()) + 0.02
    before = processor_seconds(os.getpid())
    while processor_seconds(os.getpid()) < before + 0.02:
        pass
    with pytest.raises(ProcessLookupError):
        process_start(2**22 + 1)


def test_a_plugin_without_a_runtime_loads_in_a_process_of_its_own() -> None:
    measured = measure_plugin("hash", 1)
    assert measured["runtime"] is None
    assert measured["runtime_import_ms"] < measured["plugin_load_ms"] < 5000


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_real_start_is_split_into_phases_that_add_up(tmp_path: Path) -> None:
    model = write_hash_model(tmp_path)
    words = ["--backend", "hash", "--model-path", str(model), "--load-format", "dummy"]
    start = uvloop.run(start_once(words, os.environ))
    assert sum(start.phases_s.values()) == pytest.approx(start.first_token_s)
    assert {"command", "worker", "executor_and_plugin", "registration", "first_request"} <= set(
        start.phases_s
    )
    assert all(seconds > -0.02 for seconds in start.phases_s.values())
    assert set(start.cpu_s) == {"up", "scheduler", "gateway", "worker", "executor"}
    assert all(seconds > 0 for seconds in start.cpu_s.values())


@pytest.mark.timeout(120)
def test_a_mesh_that_does_not_come_up_ends_the_benchmark_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere"):
        uvloop.run(start_once(["--model-path", str(tmp_path / "nowhere")], os.environ))
