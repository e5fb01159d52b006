"""`chipmesh bench`: load on a running server, ours or another."""

from __future__ import annotations

import typer

from meshkit.load.command import serve

commands = typer.Typer()
bench = typer.Typer(help="Load on a running server, and what came of it.", no_args_is_help=True)
bench.command("serve")(serve)
commands.add_typer(bench, name="bench")


@bench.callback()
def _family() -> None:
    """Makes `bench` a family though it has one member."""
