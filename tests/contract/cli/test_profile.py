"""`chipmesh profile` against a scheduler: what it asks for, writes and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshkit.cli import main
from tests.contract.cli.conftest import ScriptedScheduler


def line(kind: str, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"class": kind, "seconds": seconds, "share": seconds / 2, "calls": 60, "native": True, **fields}


SUMMARY = {
    "worker": "worker-0", "chip": "some chip", "model": "some model", "seconds": 5.0, "steps": 60,
    "step_s": 2.0, "idle_s": 3.0, "idle_share": 0.6, "prefill_tokens": 128, "sampled_tokens": 240,
    "classes": [
        line("mlp", 1.2, programs=["the kernel"]),
        line("attention", 0.5, native=False, programs=["reference, by torch"]),
        line("host", 0.3, calls=None, native=None, programs=["executor"]),
    ],
    "operators": [
        line("mlp", 0.8, operator="gate_up_proj", program="the kernel"),
        line("mlp", 0.4, operator="down_proj", program="the kernel"),
        line("attention", 0.5, operator="attention_decode", native=False, program="reference, by torch"),
    ],
    "communication": {
        "seconds": 0.25, "overlapped_s": 0.2, "overlap_share": 0.8, "waited_s": 0.05,
        "per_step": {"steps": 50, "seconds": 0.005, "overlapped_s": 0.004, "waited_s": 0.001},
    },
    "notes": ["something is not known"],
}  # fmt: skip
TRACE = json.dumps({"traceEvents": [], "chipmesh": SUMMARY}).encode()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_trace_is_written_as_it_came_and_the_table_says_by_whom_and_how_long(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.trace = TRACE
    assert main(["profile", "--seconds", "2.5", "--endpoint", scheduler_address]) == 0
    assert scheduler.profile is not None
    assert scheduler.profile.worker == ""
    assert scheduler.profile.duration.ToTimedelta().total_seconds() == 2.5
    assert Path("chipmesh-profile-worker-0.json").read_bytes() == TRACE
    out = capsys.readouterr().out
    rows = {row.split()[0]: row for row in out.splitlines() if row.strip()}
    assert "60 steps in 5.00 s" in rows["worker-0"]
    assert "1200.0  60.0%     60  20000.0  native: the kernel" in rows["mlp"]
    assert "400.0  20.0%" in rows["down_proj"]
    assert "fallback: reference, by torch" in rows["attention"]
    assert "attention_decode" not in out, "a class of one operator needs no second line"
    assert "idle 3000.0 ms (60.0% of the time)" in out
    assert "communication under way 250.0 ms, 80.0% of it behind computing; steps waited 50.0 ms" in out
    assert "a step (mean of 50): 5.000 ms under way, 4.000 ms behind computing, 1.000 ms waited for" in out
    assert "note: something is not known" in out
    assert "chipmesh-profile-worker-0.json (open it in ui.perfetto.dev)" in out


def test_json_is_the_sums_and_the_file(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.trace = TRACE
    words = ["profile", "--worker", "w3", "--output", "here.json", "--json", "--endpoint", scheduler_address]
    assert main(words) == 0
    assert scheduler.profile is not None
    assert scheduler.profile.worker == "w3"
    shown = json.loads(capsys.readouterr().out)
    assert shown["trace"] == "here.json"
    assert shown["classes"] == SUMMARY["classes"]
    assert Path("here.json").read_bytes() == TRACE


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "soon"])
def test_a_time_out_of_bounds_is_a_wrong_command_line(seconds: str, scheduler_address: str) -> None:
    assert main(["profile", "--seconds", seconds, "--endpoint", scheduler_address]) == 2


def test_a_profile_that_runs_already_is_said_in_the_meshs_words(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.profile_error = (grpc.StatusCode.ALREADY_EXISTS, "this executor is being profiled already")
    assert main(["profile", "--endpoint", scheduler_address]) == 1
    assert "is being profiled already" in capsys.readouterr().err
    assert not list(Path().iterdir()), "a file was written for nothing"


def test_a_file_that_cannot_be_written_names_the_flag(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.trace = TRACE
    assert main(["profile", "--output", "no/such/folder.json", "--endpoint", scheduler_address]) == 2
    assert "--output no/such/folder.json cannot be written" in capsys.readouterr().err


def test_an_answer_without_sums_is_a_fault(
    scheduler: ScriptedScheduler, scheduler_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.trace = b"{}"
    assert main(["profile", "--endpoint", scheduler_address]) == 1
    assert "of another release" in capsys.readouterr().err
