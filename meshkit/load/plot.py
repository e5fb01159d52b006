"""A run for people: how many of its requests, or tokens, took at most how long."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.load.figures import token_gaps_s
from meshkit.load.sample import Sample

SUFFIXES = (".svg", ".png")
_COLOURS = {"TTFT": "#0072b2", "TPOT": "#e69f00", "ITL": "#009e73", "E2E": "#cc79a7"}
_STYLES = {"TTFT": "-", "TPOT": "--", "ITL": ":", "E2E": "-."}


def check_plot(path: Path) -> None:
    """Before a run: whether its plot can be drawn.

    Raises:
        InvalidArgument: another suffix than .svg and .png.
        FailedPrecondition: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(
            f"--plot is {str(path)!r}; a file that ends in {' or '.join(SUFFIXES)} is allowed", field="--plot"
        )
    _load_figures()


def save_plot(path: Path, samples: Sequence[Sample], *, title: str) -> None:
    """Writes the cumulative shares of TTFT, TPOT, ITL and E2E of the requests that ended well."""
    figure = _load_figures().Figure(figsize=(8, 4.5), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for name, values_ms in shares(samples).items():
        heights = [(rank + 1) / len(values_ms) * 100 for rank in range(len(values_ms))]
        axes.step(values_ms, heights, where="post", label=name, color=_COLOURS[name], linestyle=_STYLES[name])
    axes.set(title=title, xscale="log", xlabel="ms", ylabel="% that took at most so long", ylim=(0, 101))
    axes.grid(visible=True, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def shares(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """By name, milliseconds in ascending order; what has no value above 0, which a log axis needs, is out."""
    whole = [sample for sample in samples if sample.error is None]
    values_s: dict[str, Sequence[float | None]] = {
        "TTFT": [sample.ttft_s for sample in whole],
        "TPOT": [sample.tpot_s for sample in whole],
        "ITL": token_gaps_s(whole),
        "E2E": [sample.e2e_s for sample in whole],
    }
    shown = {name: sorted(value * 1e3 for value in values if value) for name, values in values_s.items()}
    return {name: values for name, values in shown.items() if values}


def _load_figures() -> Any:
    # The class and no pyplot: that keeps figures, and a window system, for the whole process.
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            "--plot needs matplotlib, which is not installed: `pip install 'chipmesh[bench]'`"
        ) from error
