"""The command line: `chipmesh` and the families of its commands; exit codes and how errors are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import grpc
import typer

from meshkit.cli.commands import access, benchmarks, chips, mesh, operations, services, trials, tuning
from meshkit.cli.terminal import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    one_line,
    print_error,
    print_json,
)
from meshkit.errors import MeshError

# The base of all usage errors: typer gives it no name, and keeps it elsewhere from release to release.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="chipmesh",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for family in (mesh, operations, access, services, chips, trials, benchmarks, tuning):
    app.add_typer(family.commands)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"chipmesh {metadata.version('chipmesh')}")
        raise typer.Exit


@app.callback()
def chipmesh(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serves language models over a mesh of different chips."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (default: of this process' arguments) and returns the exit code.

    0: done. 1: it failed. 2: the command line is wrong. 130: interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in words
    try:
        result = app(args=words, prog_name="chipmesh", standalone_mode=False)
    except UsageError as error:
        _print_usage_error(error, as_json=as_json)
        return EXIT_USAGE
    except MeshError as error:
        print_error(error, as_json=as_json)
        return EXIT_USAGE if _is_about_a_flag(error) else EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); stdout must not be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _print_usage_error(error: Exception, *, as_json: bool) -> None:
    command = getattr(getattr(error, "ctx", None), "command_path", None) or "chipmesh"
    text = one_line(getattr(error, "format_message", error.__str__)())
    print(
        f"chipmesh: {text.rstrip('.')}; `{command} --help` lists what is known", file=sys.stderr, flush=True
    )
    if as_json:
        print_json(
            {"error": {"code": "USAGE", "reason": "USAGE", "message": text, "field": None, "metadata": {}}}
        )


def _is_about_a_flag(error: MeshError) -> bool:
    return error.code is grpc.StatusCode.INVALID_ARGUMENT and (error.field or "").startswith("--")
