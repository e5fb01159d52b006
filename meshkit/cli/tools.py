"""Runs one tool that lies above meshkit. By name, as services are: meshkit imports neither."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from meshkit.errors import FailedPrecondition

EMULATE = "emulate"
"""The option that a plugin with an emulator of its chip understands; every other plugin refuses it."""

# Each has `main(**flags) -> int`.
MODULES = {
    "conformance": "plugins.conformance.app",
    "verify": "plugins.verification.verify",
    "collectives": "plugins.verification.collectives",
    "plan": "worker_svc.plan_command",
    "simulate": "scheduler_svc.simulation.command",
    "diff": "worker_svc.diff.command",
    "chaos": "chaos.command",
}


def plugin_options(words: Sequence[str] | None, *, emulate: bool) -> tuple[str, ...]:
    """The KEY=VALUE options of a command for its plugin; `--emulate` is another name for one of them."""
    return (*(words or ()), *([f"{EMULATE}=true"] if emulate else []))


def run_named_tool(name: str, **flags: Any) -> int:
    """Returns the tool's exit code.

    Raises:
        FailedPrecondition: this installation leaves out the tool, or a package that it needs.
    """
    try:
        module = importlib.import_module(MODULES[name])
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"`chipmesh {name}` is not installed here (no module {error.name}); "
            "use an image or environment that has the plugins"
        ) from error
    exit_code: int = module.main(**flags)
    return exit_code
