"""`chipmesh collectives` between real processes: right values, and the rank that does not come is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from meshkit.cli import main
from meshkit.errors import InvalidArgument
from plugins.verification.collectives import Measurement, _print_algorithms
from plugins.verification.primitives import PRIMITIVES, find_difference
from plugins.verification.sizes import parse_sizes, show_size
from tests.unit.verification import liars


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    liars.install(tmp_path, "wrong_sum", "honest")


def collectives(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `chipmesh collectives`."""
    code = main(["collectives", "--json", *words])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in report["checks"]}


def test_every_primitive_is_right_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = collectives(capsys, "--backend", "cpu", "--ranks", "2", "--sizes", "1KiB,100KiB")
    assert code == 0, report
    assert set(statuses(report).values()) == {"PASS"}
    measured = {
        (each["primitive"], each["size_bytes"]): each for each in report["measurements"] if each["by_size"]
    }
    assert set(measured) == {(name, size) for name in PRIMITIVES for size in (1024, 102400)} | {
        ("barrier", 0)
    }
    for each in report["measurements"]:
        assert each["latency_s"] > 0
    reduced = measured["all_reduce", 102400]
    assert reduced["bandwidth_bytes_per_s"] == pytest.approx(102400 / reduced["latency_s"], rel=0.01)


def test_the_algorithms_of_a_sum_are_measured_side_by_side_and_the_one_taken_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--backend", "cpu", "--ranks", "2", "--sizes", "1KiB,8KiB", "--option", "all_reduce_border=4096")
    code, report = collectives(capsys, *words)
    assert code == 0, report
    sums = [each for each in report["measurements"] if each["primitive"] == "all_reduce"]
    assert [(each["size_bytes"], each["algorithm"], each["by_size"]) for each in sums] == [
        (1024, "ring", False), (1024, "gather", False), (1024, "gather", True),
        (8192, "ring", False), (8192, "gather", False), (8192, "ring", True),
    ]  # fmt: skip


def test_algorithms_are_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    sums = [
        Measurement("all_reduce", 1024, latency, 1.0, 1.0, 10, algorithm, by_size=by_size)
        for algorithm, latency, by_size in (
            ("ring", 3e-4, False),
            ("gather", 2e-4, False),
            ("gather", 2e-4, True),
        )
    ]
    _print_algorithms(sums, Console(width=100))
    shown = capsys.readouterr().out
    assert re.search(r"size .* ring µs .* gather µs .* taken", shown)
    assert re.search(r"1 KiB .* 300 .* 200 .* gather", shown)


def test_the_rank_that_does_not_come_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--backend", "cpu", "--ranks", "2", "--absent-rank", "1", "--timeout", "1.5")
    code, report = collectives(capsys, *words)
    assert code == 1
    found = {check["name"]: check for check in report["checks"]}
    assert found["rendezvous"]["status"] == "FAIL"
    assert found["rendezvous"]["detail"].startswith("rank 1 did not come through the rendezvous within 1.5 s")
    assert "rank 0: " in found["rendezvous"]["detail"]
    assert statuses(report)["all_reduce"] == "SKIP"


@pytest.mark.usefixtures("installed")
def test_a_wrong_sum_is_found_on_the_rank_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = collectives(capsys, "--backend", "wrong_sum", "--ranks", "2", "--sizes", "64")
    assert code == 1
    found = {check["name"]: check for check in report["checks"]}
    assert (
        "all_reduce of 64 B, rank 1: 1 of 16 elements differ, the first at 3" in found["all_reduce"]["detail"]
    )
    assert "rank 0" not in found["all_reduce"]["detail"]
    assert statuses(report)["all_gather"] == "PASS"


@pytest.mark.usefixtures("installed")
def test_a_chip_that_works_alone_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = collectives(capsys, "--backend", "honest", "--ranks", "2")
    assert code == 0
    assert (report["fail"], report["skip"]) == (0, 6)
    assert "has no collectives" in report["checks"][2]["detail"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--backend", "nobody"], "--backend"),
        (["--backend", "cpu", "--sizes", "64MB"], "--sizes"),
        (["--backend", "cpu", "--absent-rank", "2"], "--absent-rank"),
    ],
)
def test_a_wrong_command_line_has_its_own_exit_code(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = collectives(capsys, "--ranks", "2", *words)
    assert code == 2
    assert report["error"]["field"] == field


def test_sizes_run_from_first_to_last_by_fours() -> None:
    assert [show_size(size) for size in parse_sizes("1KiB..64KiB")] == ["1 KiB", "4 KiB", "16 KiB", "64 KiB"]
    assert parse_sizes("1KiB..5KiB") == (1024, 4096, 5120)
    assert parse_sizes("8,4") == (4, 8)
    for wrong in ("", "2KiB..1KiB", "3", "2GiB", "1KiB..", "-4"):
        with pytest.raises(InvalidArgument, match="--sizes"):
            parse_sizes(wrong)


def test_the_definitions_are_those_of_the_contract() -> None:
    world = 3
    for name, shape in {
        "all_reduce": (24,),
        "all_gather": (world, 8),
        "reduce_scatter": (8,),
        "broadcast": (24,),
    }.items():
        primitive = PRIMITIVES[name]
        inputs = [primitive.input_of(rank, world, 96) for rank in range(world)]
        expected = primitive.expected(1, 2, [each.copy for each in inputs])
        assert expected.shape == shape
        total = np.sum(inputs, axis=0)
        wanted = {
            "all_reduce": total,
            "all_gather": np.stack(inputs),
            "reduce_scatter": total[8:16] if name == "reduce_scatter" else total,
            "broadcast": inputs[2],
        }[name]
        assert find_difference(wanted, expected) == ""


def test_a_nan_is_a_difference() -> None:
    wanted, got = np.zeros(3, np.float32), np.array([0, np.nan, 0], np.float32)
    assert find_difference(wanted, got).startswith("1 of 3 elements differ, the first at 1: 0 wanted, nan")
