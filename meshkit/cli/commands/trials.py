"""The scheduler on modelled chips, and a mesh under faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.cli.commands.flags import AsJson

commands = typer.Typer()


@commands.command()
def simulate(
    fleet: Annotated[Path, typer.Option(help="JSON with groups of replicas of modelled chips.")],
    trace: Annotated[Path | None, typer.Option(help="JSONL in Mooncake's form. Default: synthetic.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Synthetic: requests per second.")] = 10.0,
    speed: Annotated[float, typer.Option(min=1e-6, help="Replay a trace at so many times its pace.")] = 1.0,
    ttft_bound_ms: Annotated[float, typer.Option(min=0, help="Goodput: longest time to first token.")] = 2000,
    tpot_bound_ms: Annotated[float, typer.Option(min=0, help="Goodput: longest time per token.")] = 100,
    as_json: AsJson = False,
) -> int:
    """Replay requests through the real scheduler core on modelled chips, on a virtual clock."""
    from meshkit.cli.tools import run_named_tool

    return run_named_tool(
        "simulate",
        fleet=fleet,
        trace=trace,
        requests=requests,
        rate=rate,
        speed=speed,
        ttft_bound_ms=ttft_bound_ms,
        tpot_bound_ms=tpot_bound_ms,
        as_json=as_json,
    )


@commands.command()
def chaos(
    name: Annotated[
        str | None, typer.Argument(help="A scenario, for instance R1, or `all`. Default: list them.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="How often. Default: 10.")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Streams beside the fault. Default: 32.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="As often and as wide as the scoreboard wants.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of prompts, victims, phases. Default: new.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the services' logs in this folder.")] = None,
    as_json: AsJson = False,
) -> int:
    """Do harm to a mesh of real processes; exit code 1 if a client loses a token by it, or waits too long."""
    from meshkit.cli.tools import run_named_tool

    return run_named_tool(
        "chaos",
        scenario=name,
        runs=runs,
        streams=streams,
        full=full,
        seed=seed,
        logs=logs,
        as_json=as_json,
    )
