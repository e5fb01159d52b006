"""`chipmesh verify` with real spawned processes: what does not start ends in a named error, in time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli import main
from tests.unit.verification import liars


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    liars.install(tmp_path, "hang", "crash", "honest", "decline")


def verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `chipmesh verify`."""
    code = main(["verify", "--json", *words])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in report["checks"]}


@pytest.mark.usefixtures("installed")
def test_an_honest_plugin_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, "--backend", "honest")
    assert code == 0, report
    assert (report["pass"], report["fail"], report["skip"]) == (8, 0, 1)
    assert (report["chip"], report["plugin_version"]) == ("liar", "1.0")


@pytest.mark.usefixtures("installed")
def test_a_plugin_that_hangs_in_its_start_is_named_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    code, report = verify(capsys, "--backend", "hang", "--timeout", "2")
    assert time.monotonic() - start < 10
    assert code == 1
    assert "'hang' in load: hangs: no answer within 2 s" in by_name(report)["load"]["detail"]
    assert report["skip"] == len(report["checks"]) - 1


@pytest.mark.usefixtures("installed")
def test_a_plugin_that_ends_the_process_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, "--backend", "crash")
    assert code == 1
    detail = by_name(report)["load"]["detail"]
    assert "SIGABRT" in detail
    assert "libvendor: fatal: no firmware" in detail


@pytest.mark.usefixtures("installed")
def test_a_plugin_that_declines_says_why_and_what_else_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, "--backend", "decline")
    assert code == 1
    detail = by_name(report)["load"]["detail"]
    assert "libvendor.so.5" in detail
    assert "entry points chipmesh.device_plugins: tests.unit.verification.liars:decline" in detail
    assert "cpu (plugins.cpu:backend)" in detail


@pytest.mark.usefixtures("installed")
def test_a_plugin_of_another_contract_fails_in_versions(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, "--backend", "honest", "--option", "contract=2.0")
    assert code == 1
    assert "contract 2.0; here it is 1.0" in by_name(report)["versions"]["detail"]
    assert by_name(report)["copies"]["status"] == "SKIP"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--backend", "nobody"], "--backend"),
        (["--backend", "honest", "--option", "x=1"], "--option"),
        (["--backend", "honest", "--option", "x"], "--option"),
    ],
)
def test_a_wrong_command_line_has_its_own_exit_code(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = verify(capsys, *words)
    assert code == 2
    assert report["error"]["field"] == field
