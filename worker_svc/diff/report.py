"""A comparison's findings as JSON and as tables for a person."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from plugins.sdk.differences import Nature
from plugins.sdk.planning import FALLBACKS
from worker_svc.diff.comparison import CallDifference, StageDifference, Statistics
from worker_svc.diff.session import Findings, Side

WORST_CALLS = 5
"""Operators whose worst call is shown."""
_BAR = 12
_DECADES = 9.0
"""A bar is empty at a relative difference of 1e-9, and full at 1."""


def describe(findings: Findings, model: str, *, with_statistics: bool) -> dict[str, Any]:
    """One JSON object; numbers that are not finite are null. with_statistics: of each side, by stage."""
    first = findings.first_divergence
    return {
        "model": model,
        "left": _describe_side(findings.left),
        "right": _describe_side(findings.right),
        "input": {
            "prompt_token_ids": list(findings.prompt),
            "steps": list(findings.steps),
            "page_size": findings.page_size,
            "recorded_side": findings.recorded,
        },
        "verdict": "agrees" if first is None else "diverges",
        "first_divergence": None if first is None else describe_call(first),
        "first_non_finite": {
            flag: None if (odd := findings.first_non_finite(side)) is None else _place_of(odd)
            for side, flag in enumerate(("left", "right"))
        },
        "tokens": findings.tokens,
        "end_to_end": [
            _describe_stage(stage, with_statistics=with_statistics) for stage in findings.stages.values()
        ],
        "operators": [_describe_operator(calls) for calls in by_operator(findings.calls)],
        "worst_calls": [describe_call(call) for call in worst_calls(findings.calls)],
    }


def describe_call(call: CallDifference) -> dict[str, Any]:
    """One call's difference, right - left."""
    worst = call.worst
    return {
        **_place_of(call),
        "output": call.output,
        "elements": call.elements,
        "out_of_tolerance": call.over,
        "in_tolerances": _number(call.ratio),
        "largest": _number(call.largest),
        "rms": _number(call.rms),
        "rms_relative": _number(call.relative),
        "non_finite": {"left": call.non_finite[0], "right": call.non_finite[1]},
        "worst_element": {
            "index": list(worst.index),
            "left": _number(worst.left),
            "right": _number(worst.right),
            "allowed": _number(worst.allowed),
        },
        "nature": _describe_nature(call.nature),
    }


def by_operator(calls: Sequence[CallDifference]) -> list[list[CallDifference]]:
    """Calls of each operator, in the order in which operators are first called."""
    groups: dict[str, list[CallDifference]] = {}
    for call in calls:
        groups.setdefault(call.operator, []).append(call)
    return list(groups.values())


def worst_calls(calls: Sequence[CallDifference]) -> list[CallDifference]:
    """The worst call of each of the few operators that differ most in tolerances, if they do at all."""
    worst = [max(group, key=lambda call: call.ratio) for group in by_operator(calls)]
    ordered = sorted(worst, key=lambda call: call.ratio, reverse=True)
    return [call for call in ordered[:WORST_CALLS] if call.ratio > 0]


def print_findings(findings: Findings, model: str, console: Console, *, with_statistics: bool) -> None:
    """Sides, stages, operators, worst calls, verdict."""
    lines = [f"{model}: right − left"]
    for flag, side in (("left ", findings.left), ("right", findings.right)):
        lines.append(f"  {flag} {_side_in_words(side)}")
    steps = ", ".join(findings.steps)
    lines.append(f"  input {len(findings.prompt)} tokens: {steps}; pages of {findings.page_size}")
    _print_lines(lines, console)
    console.print(_stage_table(findings))
    if with_statistics:
        console.print(_statistics_table(findings))
    console.print(_operator_table(findings))
    lines = ["worst call of the operators that differ most:"]
    for call in worst_calls(findings.calls):
        lines += _call_lines(call)
    for flag in ("left", "right"):
        lines.append(f"tokens {flag}: {' '.join(map(str, findings.tokens[flag]))}")
    _print_lines([*lines, *verdict(findings)], console)


def verdict(findings: Findings) -> list[str]:
    """What came out, in a line or a few."""
    lines = []
    for flag, side in (("left", 0), ("right", 1)):
        if odd := findings.first_non_finite(side):
            lines.append(f"not finite on the {flag} first in {_place_in_words(odd)}")
    first = findings.first_divergence
    if first is None:
        return [*lines, f"agrees: all {len(findings.calls)} operator calls are within tolerance"]
    count = sum(call.diverges for call in findings.calls)
    worst = first.worst
    place = (
        f"DIVERGES first in {_place_in_words(first)}: {_times(first.ratio)} × its tolerance, {first.over} of "
        f"{first.elements} elements of {first.output}; at {list(worst.index)} left {worst.left:.7g}, right "
        f"{worst.right:.7g}, allowed {worst.allowed:.2g}"
    )
    return [
        *lines,
        place,
        f"{first.nature.kind.value}: {first.nature.reason} ({_nature_in_words(first.nature)})",
        f"{count} of {len(findings.calls)} operator calls diverge",
    ]


def _describe_side(side: Side) -> dict[str, Any]:
    plan = side.plan
    return {
        "backend": side.open.name,
        "chip": plan.chip,
        "emulated": plan.emulated,
        "emulation_note": side.open.report.emulation_note,
        "dtype": plan.dtype.value,
        "accumulation_dtype": plan.accumulation_dtype.value,
        "kv_cache_dtype": plan.kv_cache_dtype.value,
        "kv_layout": plan.kv_layout.value,
        "quantization": plan.quantization.value,
        "operators": _choices(side),
    }


def _describe_stage(stage: StageDifference, *, with_statistics: bool) -> dict[str, Any]:
    line: dict[str, Any] = {
        "stage": stage.name,
        "largest": stage.difference.largest,
        "rms": stage.difference.rms,
        "largest_relative": _number(stage.largest_relative),
        "rms_relative_by_row": _number(stage.rms_relative),
    }
    if with_statistics:
        line["left"], line["right"] = _describe_statistics(stage.left), _describe_statistics(stage.right)
    return line


def _describe_statistics(values: Statistics) -> dict[str, float]:
    return {
        "largest": values.largest,
        "mean": values.mean,
        "deviation": values.deviation,
        "non_finite_share": values.non_finite,
    }


def _describe_operator(calls: Sequence[CallDifference]) -> dict[str, Any]:
    worst = max(calls, key=lambda call: call.ratio)
    return {
        "operator": worst.operator,
        "calls": len(calls),
        "diverging": sum(call.diverges for call in calls),
        "worst": describe_call(worst),
    }


def _describe_nature(nature: Nature) -> dict[str, Any]:
    return {
        "kind": nature.kind.value,
        "reason": nature.reason,
        "size": _number(nature.size),
        "slope": _number(nature.slope),
        "along_value": _number(nature.along),
        "along_value_in_standard_errors": _number(nature.along_errors),
        "bias": _number(nature.bias),
        "bias_in_standard_errors": _number(nature.bias_errors),
    }


def _choices(side: Side) -> dict[str, list[str]]:
    """How each operator runs; in several ways where the model has it in several sizes."""
    found: dict[str, list[str]] = {}
    for decision in side.plan.operators:
        ways = found.setdefault(decision.name, [])
        if decision.choice not in ways:
            ways.append(decision.choice)
    return found


def _place_of(call: CallDifference) -> dict[str, Any]:
    return {"layer": call.layer, "operator": call.operator, "where": call.where, "step": call.step}


def _stage_table(findings: Findings) -> Table:
    table = Table(
        title_justify="left", title="end to end: each side on its own inputs; share of the values' size"
    )
    for column in ("stage", "largest", "rms by row", "1e-9 … 1", "worst call"):
        table.add_column(column)
    worst: dict[str, float] = {}
    for call in findings.calls:
        worst[call.layer] = max(worst.get(call.layer, 0.0), call.ratio)
    for stage in findings.stages.values():
        table.add_row(
            stage.name,
            f"{stage.largest_relative:.2e}",
            f"{stage.rms_relative:.2e}",
            _bar(stage.rms_relative),
            f"{_marked(worst.get(stage.name, 0.0))} × tolerance",
        )
    return table


def _statistics_table(findings: Findings) -> Table:
    table = Table(title_justify="left", title="values of each side by stage")
    for column in ("stage", "side", "largest", "mean", "deviation", "not finite"):
        table.add_column(column)
    for stage in findings.stages.values():
        for flag, values in (("left", stage.left), ("right", stage.right)):
            table.add_row(
                stage.name if flag == "left" else "",
                flag,
                f"{values.largest:.4g}",
                f"{values.mean:+.3e}",
                f"{values.deviation:.4g}",
                f"{values.non_finite:.2%}",
            )
    return table


def _operator_table(findings: Findings) -> Table:
    table = Table(
        title_justify="left",
        title=f"operators: each call on the inputs that it had on the {findings.recorded}",
    )
    for column in ("operator", "calls", "diverge", "× tolerance", "worst in"):
        table.add_column(column, overflow="fold", no_wrap=column == "operator")
    for calls in by_operator(findings.calls):
        worst = max(calls, key=lambda call: call.ratio)
        count = sum(call.diverges for call in calls)
        place = f"{_short(worst.where)}, {worst.step}" if worst.ratio else ""
        table.add_row(worst.operator, str(len(calls)), str(count), _marked(worst.ratio), place)
    return table


def _print_lines(lines: Sequence[str], console: Console) -> None:
    """Unbroken, so that they can be searched; markup in names is text."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _call_lines(call: CallDifference) -> list[str]:
    size = f"rms {call.relative:.1e} of the values, {call.over} of {call.elements} out of tolerance"
    return [
        f"  {_marked(call.ratio)} × tolerance: {call.operator} of {_short(call.where)}, {call.step}",
        f"    {size}",
        f"    {call.nature.kind.value}: {_nature_in_words(call.nature)}",
    ]


def _side_in_words(side: Side) -> str:
    plan = side.plan
    emulated = " (emulated)" if plan.emulated else ""
    fallen = [f"{each.name} {each.choice}" for each in plan.operators if each.choice in FALLBACKS]
    line = f"{side.open.name}{emulated}: {plan.dtype.value}, sums in {plan.accumulation_dtype.value}"
    return line if side.open.is_reference or not fallen else f"{line}; {', '.join(dict.fromkeys(fallen))}"


def _nature_in_words(nature: Nature) -> str:
    return (
        f"{nature.slope:+.1e} of the value (direction {nature.along:+.2f}, {nature.along_errors:+.1f} "
        f"standard errors), bias {nature.bias:+.1e} ({nature.bias_errors:+.1f} standard errors)"
    )


def _short(where: str) -> str:
    return where.removeprefix("model.")


def _place_in_words(call: CallDifference) -> str:
    return f"{call.layer}: {call.operator} of {call.where} ({call.step})"


def _marked(ratio: float) -> str:
    return f"{_times(ratio)} !" if ratio > 1 else _times(ratio)


def _times(ratio: float) -> str:
    return "∞" if math.isinf(ratio) else f"{ratio:.2g}"


def _bar(relative: float) -> str:
    """On a logarithmic scale."""
    if relative <= 0:
        return ""
    share = min(max(1 + math.log10(min(relative, 1.0)) / _DECADES, 0.0), 1.0)
    return "█" * max(round(share * _BAR), 1)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
