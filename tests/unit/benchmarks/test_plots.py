"""Plots are files that a browser or an image viewer reads, and a flag of those benchmarks that can draw."""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import save_bars, save_lines
from benchmarks.report import run_command

GROUPS = {"1": {"ours": 120.0, "theirs": 40.5}, "8": {"ours": 260.0}}


def texts(svg: Path) -> str:
    """All of a drawing's words: matplotlib leaves each text as a comment beside its outlines."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    root = ET.parse(svg, parser).getroot()
    return " | ".join(element.text or "" for element in root.iter() if callable(element.tag))


@pytest.fixture(autouse=True)
def _needs_matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="pip install 'chipmesh[bench]'")


def test_bars_carry_their_title_names_unit_and_values(tmp_path: Path) -> None:
    file = tmp_path / "made" / "bars.svg"
    save_bars(file, "Output by concurrency", GROUPS, "tokens/s")
    words = texts(file)
    for word in ("Output by concurrency", "ours", "theirs", "tokens/s", "40.5", "260"):
        assert word in words


def test_lines_are_written_as_png_too(tmp_path: Path) -> None:
    file = tmp_path / "lines.png"
    save_lines(file, "Memory", {"gateway": [(0.0, 80.0), (1.0, 81.0)], "empty": []}, "minutes", "MiB")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_nothing_or_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no value"):
        save_bars(tmp_path / "bars.svg", "nothing", {"1": {}}, "s")
    with pytest.raises(ValueError, match="no point"):
        save_lines(tmp_path / "lines.svg", "nothing", {"a": []}, "x", "y")
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        save_bars(tmp_path / "bars.gif", "another", GROUPS, "s")


def test_without_matplotlib_the_refusal_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"chipmesh\[bench\]"):
        save_bars(tmp_path / "bars.svg", "t", GROUPS, "s")


def run_with(words: list[str], *, plots: bool) -> None:
    def plot(file: Path, report: dict[str, Any]) -> None:
        save_bars(file, "t", {"g": {"value": report["value"]}}, "s")

    run_command(
        argparse.ArgumentParser(),
        lambda _: {"value": 2.5},
        print,
        ["--even-if-busy", "--json", *words],
        plot=plot if plots else None,
    )


def test_a_benchmark_with_a_plot_draws_its_report_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.svg"
    run_with(["--plot", str(file)], plots=True)
    assert json.loads(capsys.readouterr().out) == {"value": 2.5}
    assert "2.5" in texts(file)


def test_a_benchmark_without_a_plot_has_no_such_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_with(["--plot", "x.svg"], plots=False)
    assert "--plot" in capsys.readouterr().err


def test_a_format_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run_with(["--plot", "x.gif"], plots=True)
    captured = capsys.readouterr()
    assert "x.gif" in captured.err
    assert not captured.out
