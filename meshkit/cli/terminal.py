"""What the commands print: results on stdout, progress and one-line errors on stderr, JSON on request."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshkit.errors import MeshError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_error(error: MeshError, *, as_json: bool) -> None:
    """One line on stderr; with `as_json` also {"error": {...}} on stdout."""
    print(f"chipmesh: {one_line(error.message)}", file=sys.stderr, flush=True)
    if as_json:
        print_json({"error": describe_error(error)})


def describe_error(error: MeshError) -> dict[str, Any]:
    """The error as JSON: code, reason, message, field (null where none is at fault), metadata."""
    return {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "field": error.field,
        "metadata": error.metadata,
    }


def one_line(text: str) -> str:
    """`text` with all runs of white space, line breaks too, as single spaces."""
    return " ".join(text.split())


def own_command() -> str:
    """How a person types this command from their shell: its name where PATH has it, else its path."""
    beside_python = Path(sys.executable).with_name("chipmesh")
    found = shutil.which("chipmesh")
    if found is not None and (not beside_python.exists() or Path(found).samefile(beside_python)):
        return "chipmesh"
    return shlex.quote(str(beside_python)) if beside_python.exists() else f"{sys.executable} -m meshkit.cli"
