"""A search for people: each setting's share of the default's score, over the setting that has most values."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LABELS = {
    "chunked_prefill_size": "chunked_prefill_size, tokens",
    "max_running_requests": "max_running_requests",
    "step_window_s": "step_window_s",
}
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Line = list[tuple[float, float]]


def save_plot(
    path: Path, rows: Sequence[Mapping[str, Any]], *, default: Mapping[str, float], title: str
) -> None:
    """rows: of `describe_outcome`. default: values of the default, for the places of its points; the window's
    is unknown. The path was checked by `meshkit.load.plot.check_plot`.
    """
    axis = widest_axis(rows)
    lines = lines_of(rows, axis, default=default)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 4.5), dpi=150, facecolor="white", layout="constrained"
    )
    axes = figure.add_subplot()
    axes.axhline(1.0, color="#999999", linewidth=1)
    for index, (name, points) in enumerate(lines.items()):
        look = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}
        axes.plot(*zip(*points, strict=True), label=name, **look)
    if axis != "step_window_s":
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(title=title, xlabel=LABELS[axis], ylabel="of the default's score")
    axes.grid(visible=True, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        figure.legend(frameon=False, ncols=min(len(lines), 3), loc="outside lower center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def widest_axis(rows: Sequence[Mapping[str, Any]]) -> str:
    """The setting of which most values were tried."""
    return max(LABELS, key=lambda name: len({row[name] for row in rows}))


def lines_of(
    rows: Sequence[Mapping[str, Any]], axis: str, *, default: Mapping[str, float]
) -> dict[str, Line]:
    """By what the other settings are, points (value, share of the default's score) in ascending order."""
    lines: dict[str, Line] = {}
    for row in rows:
        # Nobody knows which window the chip prefers: the line at 1 stands for it.
        if row["of_default"] is None or (row[axis] is None and axis not in default):
            continue
        others = {name: row[name] for name in LABELS if name != axis}
        told = ", ".join(f"{name} {value:g}" for name, value in others.items() if value is not None)
        place = default[axis] if row[axis] is None else row[axis]
        lines.setdefault(told or "others as they were", []).append((place, row["of_default"]))
    return {name: sorted(points) for name, points in lines.items()}
