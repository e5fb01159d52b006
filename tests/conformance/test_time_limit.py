"""A check that hangs is a failure with a name, and the run ends: real processes of `chipmesh conformance`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from plugins.conformance.kit import Limits, run_conformance
from plugins.conformance.report import Fault, Report, Status
from plugins.conformance.time_limit import TimeLimit
from plugins.sdk import registry
from tests.conformance import hanging
from tests.conformance.executors import running_executor

ROOT = Path(__file__).resolve().parents[2]
ENOUGH_S = 60.0
"""Most of it is the start of an interpreter with torch on a busy machine."""


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """Of a process that finds the hanging plugins."""
    hanging.install(tmp_path)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def conformance(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    # Imported before the time runs: on a busy machine torch alone takes longer than the limit of these tests.
    script = "import sys, torch, meshkit.cli; sys.exit(meshkit.cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "conformance", "--timeout", "3", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=ENOUGH_S
    )


def by_name(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in report["results"]}


def test_a_check_that_hangs_fails_by_name_and_the_run_ends_with_its_report(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    junit = tmp_path / "report.xml"
    ended = conformance(environment, "--backend", "in_memory", "--quick", "--json", "--junit", str(junit))
    assert ended.returncode == 1, ended.stderr
    report = json.loads(ended.stdout)
    results = by_name(report)
    hung = results["memory/free_is_idempotent"]
    assert (hung["status"], hung["fault"]) == ("FAIL", "TIMED_OUT")
    assert "not done after 3 s" in hung["detail"]
    assert results["memory/copy"]["status"] == results["device/count"]["status"] == "PASS"
    not_run = [name for name, each in results.items() if each["status"] == "SKIP not run"]
    assert not_run == ["memory/stats", "memory/refusals", "memory/negative_size", "memory/views",
                       "operators", "collectives"]  # fmt: skip
    assert (report["fail"], report["skip_not_run"]) == (1, len(not_run))
    assert report["chip"] == "cpu"
    failure = ElementTree.parse(junit).getroot().find("testcase/failure")
    assert failure is not None
    assert failure.attrib["type"] == "TIMED_OUT"


def test_a_back_end_that_hangs_at_its_start_is_reported(environment: Mapping[str, str]) -> None:
    ended = conformance(environment, "--backend", "at_start")
    assert ended.returncode == 1, ended.stderr
    assert "FAIL load: TIMED_OUT" in ended.stdout
    assert "not run" in ended.stdout


@pytest.mark.nightly
def test_a_native_call_that_keeps_the_interpreter_ends_with_it(environment: Mapping[str, str]) -> None:
    ended = conformance(environment, "--backend", "with_the_lock", "-k", "memory/")
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in stats" in ended.stderr


@pytest.mark.nightly
def test_a_collective_that_hangs_leaves_the_others_their_results(environment: Mapping[str, str]) -> None:
    ended = conformance(
        environment, "--backend", "in_ranks", "-k", "collectives/", "--json", "--timeout", "15"
    )
    assert ended.returncode == 1, ended.stderr
    results = by_name(json.loads(ended.stdout))
    assert {name: each["status"] for name, each in results.items()} == {
        "collectives/all_reduce": "PASS",
        "collectives/all_gather": "PASS",
        "collectives/reduce_scatter": "FAIL",
        "collectives/broadcast": "SKIP not run",
        "collectives/barrier": "SKIP not run",
        "collectives/async_all_reduce": "SKIP not run",
    }
    assert results["collectives/reduce_scatter"]["fault"] == "TIMED_OUT"


def test_an_executor_that_hangs_is_reported_by_its_address(environment: Mapping[str, str]) -> None:
    with running_executor("in_memory", environment=environment) as address:
        start = time.monotonic()
        ended = conformance(environment, "--address", address, "-k", "memory/", "--json")
        assert time.monotonic() - start < ENOUGH_S
    assert ended.returncode == 1, ended.stderr
    failed = [each for each in json.loads(ended.stdout)["results"] if each["status"] == "FAIL"]
    assert [each["fault"] for each in failed] == ["TIMED_OUT"]


def test_a_hang_is_told_once_with_what_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where the check can be let go on."""
    monkeypatch.setattr(registry, "_registered", {})
    told: list[Report] = []
    go_on = threading.Event()
    monkeypatch.setattr(hanging, "_NEVER", go_on)
    registry.register_backend("planted", hanging.in_memory)

    def take(report: Report) -> None:
        told.append(report)
        go_on.set()

    run_conformance("planted", only="memory/", limits=Limits(0.2, take))
    assert [result.fault for result in told[0].failures] == [Fault.TIMED_OUT]
    assert told[0].count(Status.PASS) == 7
    assert len(told) == 1


def test_what_ends_in_time_is_left_alone() -> None:
    hung: list[str] = []
    limit = TimeLimit(30.0, hung.append)
    with limit.watch("quick"):
        pass
    assert hung == []
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers)
