"""Prints what worker_svc.plan_budget worked out: tables for people, plain values for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from meshkit.cli.terminal import describe_error
from worker_svc.memory_budget import RankBudget, SetBudget, in_gb
from worker_svc.plan_budget import GroupPlan, PlannedChip, ReplicaPlan

_COLUMNS = (
    "rank", "chip", "memory", "layers", "heads", "kv heads",
    "weights", "KV a token", "activations", "graphs", "reserve", "tokens",
)  # fmt: skip
_WIDE = 1000
"""Columns of a terminal on which every table fits."""
_NARROW_RANKS = 4
"""Ranks side by side on a narrow one."""


def print_groups(groups: Sequence[GroupPlan], model: str, console: Console) -> None:
    """A table for each replica, and what fits."""
    for group in groups:
        for number, replica in enumerate(group.replicas):
            _print_replica(replica, f"{group.name}, replica {number}: {model}", console)


def groups_to_json(groups: Sequence[GroupPlan]) -> list[dict[str, Any]]:
    """The same as plain values; bytes and tokens are numbers."""
    return [
        {"name": group.name, "replicas": [_replica_to_json(each) for each in group.replicas]}
        for group in groups
    ]


def _print_replica(replica: ReplicaPlan, title: str, console: Console) -> None:
    modelled = ", modelled chips" if replica.chips[0].modelled else ""
    devices = " + ".join(str(chip.device) for chip in replica.chips)
    title = f"{title} on {devices}{modelled}"
    if replica.refusal is not None:
        console.print(f"{title}\n  refused: {replica.refusal.message}\n", soft_wrap=True)
        return
    budget = replica.budget
    assert budget is not None, "what is not refused has a budget"
    console.print(title, soft_wrap=True)
    rows = [_row(chip, rank, budget) for chip, rank in zip(replica.chips, budget.ranks, strict=True)]
    for table in _tables(rows, console):
        console.print(table)
    layout, need = budget.layout, budget.need
    console.print(
        f"  layout {layout.tensor} x {layout.pipeline} (tensor x pipeline): {replica.reason}\n"
        f"  {need.form.label}; steps of {need.steps.chunk_tokens} prompt tokens and {need.steps.window} "
        f"requests\n  {budget.tokens} tokens fit, {budget.page_count} pages of {budget.page_size}: "
        f"{_requests(budget)}\n  of rank 0: {budget.ranks[0].rule}\n",
        soft_wrap=True,
    )


def _tables(rows: Sequence[Sequence[str]], console: Console) -> list[Table]:
    """One with a line for each rank; where the terminal is too narrow, several with a column for each."""
    table = _table(_COLUMNS, rows)
    if console.measure(table, options=console.options.update(width=_WIDE)).maximum <= console.width:
        return [table]
    parts = [rows[first : first + _NARROW_RANKS] for first in range(0, len(rows), _NARROW_RANKS)]
    turned = [list(zip(_COLUMNS, *part, strict=True)) for part in parts]
    return [_table(lines[0], lines[1:]) for lines in turned]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _requests(budget: SetBudget) -> str:
    context = budget.need.context_tokens
    if count := budget.full_context_requests:
        return f"{count} request{'s' if count > 1 else ''} of the full context of {context}"
    return f"no request of the full context of {context}, one of up to {budget.tokens}"


def _row(chip: PlannedChip, rank: RankBudget, budget: SetBudget) -> tuple[str, ...]:
    place, config = rank.place, budget.need.config
    return (
        str(place.rank),
        _label(chip),
        in_gb(rank.share_bytes),
        _span(place.layers(config["num_hidden_layers"])),
        _span(place.heads(config["num_attention_heads"])),
        _span(place.kv_heads(config["num_key_value_heads"])),
        in_gb(rank.weight_bytes),
        f"{rank.kv_bytes_per_token} B",
        in_gb(rank.activation_bytes),
        in_gb(rank.graph_bytes) if rank.graph_bytes else "0",
        in_gb(budget.reserve_bytes(rank)),
        str(rank.page_count * budget.page_size),
    )


def _label(chip: PlannedChip) -> str:
    name = "" if chip.report.chip == chip.device.backend else f" {chip.report.chip}"
    return f"{chip.device}{name}{' (emulated)' if chip.report.emulated else ''}"


def _span(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"


def _replica_to_json(replica: ReplicaPlan) -> dict[str, Any]:
    document: dict[str, Any] = {
        "devices": [str(chip.device) for chip in replica.chips],
        "modelled": replica.chips[0].modelled,
    }
    if replica.refusal is not None:
        return {**document, "refusal": describe_error(replica.refusal)}
    budget = replica.budget
    assert budget is not None, "what is not refused has a budget"
    need = budget.need
    ranks = zip(replica.chips, budget.ranks, strict=True)
    return {
        **document,
        "layout": {
            "tensor_parallel_size": budget.layout.tensor,
            "pipeline_parallel_size": budget.layout.pipeline,
            "reason": replica.reason,
        },
        "dtype": need.form.dtype,
        "kv_cache_dtype": need.form.kv_cache_dtype,
        "weights": need.form.label,
        "chunk_tokens": need.steps.chunk_tokens,
        "max_running_requests": need.steps.window,
        "page_size": budget.page_size,
        "page_count": budget.page_count,
        "tokens": budget.tokens,
        "context_tokens": need.context_tokens,
        "full_context_requests": budget.full_context_requests,
        "rule": budget.ranks[0].rule,
        "ranks": [_rank_to_json(chip, rank, budget) for chip, rank in ranks],
    }


def _rank_to_json(chip: PlannedChip, rank: RankBudget, budget: SetBudget) -> dict[str, Any]:
    place, config = rank.place, budget.need.config
    return {
        "rank": place.rank,
        "device": str(chip.device),
        "chip": chip.report.chip,
        "emulated": chip.report.emulated,
        "memory_bytes": rank.share_bytes,
        "layers": _ends(place.layers(config["num_hidden_layers"])),
        "heads": _ends(place.heads(config["num_attention_heads"])),
        "kv_heads": _ends(place.kv_heads(config["num_key_value_heads"])),
        "weight_bytes": rank.weight_bytes,
        "kv_bytes_per_token": rank.kv_bytes_per_token,
        "activation_bytes": rank.activation_bytes,
        "graph_bytes": rank.graph_bytes,
        "reserve_bytes": budget.reserve_bytes(rank),
        "tokens": rank.page_count * budget.page_size,
    }


def _ends(numbers: range) -> list[int]:
    """[first, end), as everywhere in the code."""
    return [numbers.start, numbers.stop]
