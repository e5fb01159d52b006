"""Figures for people: bars by group, lines by series. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png")
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999")
"""Okabe and Ito's palette, told apart by people with any colour vision; the yellow is left out, which is too
pale on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Lines differ by these too, so that a print in black and white can be read."""
_BAR_WIDTH = 0.8
"""Of the room between two groups."""
_LEVEL_LETTERS = 60
"""So many letters of groups' names fit beside each other; more are written at a slant."""


def save_bars(path: Path | str, title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """Write bars: one cluster a group, in it one bar a name, each with its value.

    groups: by group name, by bar name; a bar that a group lacks leaves its place empty.
    path: ends in .svg or .png; folders are made.

    Raises:
        ValueError: another suffix, or no value at all.
        SystemExit: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    if not names:
        raise ValueError(f"groups holds no value to draw for {title!r}; give at least one bar")
    figure, axes = _open(path, title)
    axes.set_ylabel(unit)
    width = _BAR_WIDTH / len(names)
    for index, name in enumerate(names):
        places = [(at, bars[name]) for at, bars in enumerate(groups.values()) if name in bars]
        offset = (index - (len(names) - 1) / 2) * width
        drawn = axes.bar(
            [at + offset for at, _ in places],
            [value for _, value in places],
            width * 0.92,
            label=name,
            color=COLOURS[index % len(COLOURS)],
        )
        axes.bar_label(drawn, fmt="{:.4g}", fontsize=8, padding=2)
    slant = {"rotation": 25, "ha": "right"} if sum(map(len, groups)) > _LEVEL_LETTERS else {}
    axes.set_xticks(range(len(groups)), list(groups), **slant)
    axes.margins(y=0.12)
    axes.grid(visible=True, axis="y", color="#dddddd")
    _close(path, figure, series=len(names))


def save_lines(
    path: Path | str,
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
) -> None:
    """Write lines: one a series of (x, y), from zero upwards where no value is negative.

    path: ends in .svg or .png; folders are made.

    Raises:
        ValueError: another suffix, or no point at all.
        SystemExit: matplotlib is not installed.
    """
    if not any(series.values()):
        raise ValueError(f"series holds no point to draw for {title!r}; give at least one")
    figure, axes = _open(path, title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    for index, (name, points) in enumerate(series.items()):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            # A long series would be a band of markers: some ten of them name a line as well.
            markevery=max(1, len(points) // 10),
            markersize=5,
            linewidth=1.6,
        )
    if all(y >= 0 for points in series.values() for _, y in points):
        axes.set_ylim(bottom=0)
    axes.grid(visible=True, color="#dddddd")
    _close(path, figure, series=len(series))


def check_path(path: Path | str) -> Path:
    """The path. Raises ValueError where its suffix names no format of ours."""
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"plot is {str(path)!r}; expected a file that ends in {' or '.join(SUFFIXES)}")
    return Path(path)


def require_matplotlib() -> None:
    """Raises SystemExit with the command that installs it where matplotlib is missing: before a benchmark
    runs for minutes.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise SystemExit(
            f"a plot needs matplotlib ({error}): pip install 'chipmesh[bench]', or leave the plot out"
        ) from error


def _open(path: Path | str, title: str) -> tuple[Any, Any]:
    check_path(path)
    require_matplotlib()
    # The class and no pyplot: that keeps figures, and a window system, for the whole process.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot(facecolor="white")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _close(path: Path | str, figure: Any, *, series: int) -> None:
    if series > 1:
        figure.legend(frameon=False, ncols=min(series, 4), loc="outside lower center")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
