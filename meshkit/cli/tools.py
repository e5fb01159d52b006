"""Runs one tool that lies above meshkit. By name, as services are: meshkit imports neither."""

from __future__ import annotations

import importlib
from typing import Any

from meshkit.errors import FailedPrecondition

# Each has `main(**flags) -> int`.
MODULES = {
    "conformance": "plugins.conformance.app",
    "verify": "plugins.verification.verify",
    "collectives": "plugins.verification.collectives",
}


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
