"""Runs one service in this process. By name: meshkit sits below the services and imports none."""

from __future__ import annotations

import importlib
from pathlib import Path

from meshkit.errors import FailedPrecondition

# Each has `main(config_path: str) -> int`.
MODULES = {"gateway": "gateway.app", "scheduler": "scheduler_svc.app", "worker": "worker_svc.app"}


def run_named_service(name: str, config: Path) -> int:
    """Returns the service's exit code when it ends.

    Raises:
        FailedPrecondition: this installation leaves the service out, as an image of another one does.
    """
    module_name = MODULES[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, module_name.partition(".")[0]):
            raise
        raise FailedPrecondition(
            f"the {name} service is not installed here (no module {error.name}); "
            "use an image or environment that has it"
        ) from error
    exit_code: int = module.main(str(config))
    return exit_code
