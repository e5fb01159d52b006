"""What a simulated run amounts to: throughput, TTFT, TPOT, hit rate and goodput, by group and in all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler_svc.simulation.fleet import Fleet
from scheduler_svc.simulation.simulator import Outcome, RequestRecord

_TABLE_WIDTH = 110
_SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def summarise(outcome: Outcome, fleet: Fleet, *, ttft_bound_s: float, tpot_bound_s: float) -> dict[str, Any]:
    """{"all": figures, "groups": {NAME: figures}}. Times in ms, rates per second of the virtual clock.

    TTFT: arrival to first token. TPOT: (last token - first token) / (output tokens - 1). hit_rate: share of
    prompt tokens found in a cache. goodput: requests per second that meet both bounds.
    """
    bounds = (ttft_bound_s, tpot_bound_s)
    groups = {
        group.name: {
            "replicas": group.replicas,
            "weight": group.weight,
            "utilisation": _share(outcome.busy_s.get(group.name, 0.0), group.replicas * outcome.end_s),
            **_figures([each for each in outcome.records if each.group == group.name], outcome.end_s, bounds),
        }
        for group in fleet.groups
    }
    return {
        "virtual_s": round(outcome.end_s, 3),
        "steps": outcome.steps,
        "bounds_ms": {"ttft": ttft_bound_s * 1e3, "tpot": tpot_bound_s * 1e3},
        "all": _figures(outcome.records, outcome.end_s, bounds),
        "groups": groups,
    }


def print_report(summary: dict[str, Any]) -> None:
    """One line for each group, and one for all."""
    # A narrow terminal wraps whole lines; columns squeezed to two letters would help nobody.
    console = Console(highlight=False, width=max(Console().width, _TABLE_WIDTH))
    table = Table(title=f"{summary['all']['requests']} requests in {summary['virtual_s']:.0f} s (virtual)")
    columns = ("group", "requests", "failed", "out tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99",
               "hit rate", "goodput", "busy")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "group" else "right")
    for name, figures in summary["groups"].items():
        table.add_row(*_row(name, figures))
    table.add_section()
    table.add_row(*_row("all", summary["all"]))
    console.print(table)
    bounds = summary["bounds_ms"]
    console.print(
        f"times in ms; goodput: requests/s with TTFT <= {bounds['ttft']:.0f} ms and "
        f"TPOT <= {bounds['tpot']:.0f} ms"
    )


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    ttft, tpot = figures["ttft_ms"], figures["tpot_ms"]
    busy = figures.get("utilisation")
    return [
        name, str(figures["requests"]), str(figures["failed"]), f"{figures['output_tokens_per_s']:.0f}",
        *(f"{times[share]:.1f}" if times else "" for times in (ttft, tpot) for share in ("p50", "p99")),
        f"{figures['hit_rate']:.1%}", f"{figures['goodput_per_s']:.1f}",
        "" if busy is None else f"{busy:.0%}",
    ]  # fmt: skip


def _figures(records: Sequence[RequestRecord], end_s: float, bounds: tuple[float, float]) -> dict[str, Any]:
    ended = [each for each in records if each.first_token_s is not None and not each.failure]
    ttft = [_ttft(each) for each in ended]
    tpot = [_tpot(each) for each in ended if each.output_tokens > 1]
    good = sum(_ttft(each) <= bounds[0] and _tpot(each) <= bounds[1] for each in ended)
    return {
        "requests": len(records),
        "failed": sum(bool(each.failure) for each in records),
        "input_tokens": sum(each.input_tokens for each in records),
        "output_tokens": sum(each.output_tokens for each in records),
        "output_tokens_per_s": _share(sum(each.output_tokens for each in records), end_s),
        "ttft_ms": _percentiles(ttft),
        "tpot_ms": _percentiles(tpot),
        "hit_rate": _share(
            sum(each.cached_tokens for each in ended), sum(each.input_tokens for each in ended)
        ),
        "goodput_per_s": _share(good, end_s),
    }


def _ttft(record: RequestRecord) -> float:
    assert record.first_token_s is not None
    return record.first_token_s - record.arrived_s


def _tpot(record: RequestRecord) -> float:
    if record.output_tokens < 2:
        return 0.0
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    return (record.last_token_s - record.first_token_s) / (record.output_tokens - 1)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {
        name: round(ordered[min(last, int(share * len(ordered)))] * 1e3, 3) for name, share in _SHARES.items()
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
