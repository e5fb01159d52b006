"""Each service alone, as containers run it."""

from __future__ import annotations

from pathlib import Path

import typer

from meshkit.cli.commands.flags import ConfigFile

commands = typer.Typer()


@commands.command()
def gateway(config: ConfigFile) -> int:
    """Run the gateway service alone."""
    return _run_service("gateway", config)


@commands.command()
def scheduler(config: ConfigFile) -> int:
    """Run the scheduler service alone."""
    return _run_service("scheduler", config)


@commands.command()
def worker(config: ConfigFile) -> int:
    """Run one worker service alone."""
    return _run_service("worker", config)


def _run_service(name: str, config: Path) -> int:
    from meshkit.cli.services import run_named_service

    return run_named_service(name, config)
