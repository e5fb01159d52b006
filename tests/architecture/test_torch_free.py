"""What must import where no torch is: gateway and scheduler images, supervisors, the executor's shell."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = (
    "meshkit.cli",
    "gateway.app",
    "scheduler_svc.app",
    "worker_svc.app",
    "worker_svc.config",
    "worker_svc.supervisor",
    "worker_svc.executor",
    "plugins",
    "plugins.sdk",
    "plugins.sdk.contract",
    "plugins.hash",
)
# Blocks torch as a machine without it would, then imports the module.
BLOCKED_IMPORT = """
import importlib, sys
sys.modules["torch"] = None
importlib.import_module(sys.argv[1])
"""


def import_without_torch(module: str) -> subprocess.CompletedProcess[str]:
    """Imports `module` in a fresh interpreter where `import torch` fails."""
    command = [sys.executable, "-W", "error::ImportWarning", "-c", BLOCKED_IMPORT, module]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_imports_without_torch(module: str) -> None:
    if find_spec(module.split(".", maxsplit=1)[0]) is None:
        pytest.skip(f"package {module.split('.', maxsplit=1)[0]} does not exist yet")
    result = import_without_torch(module)
    assert result.returncode == 0, result.stderr


def test_the_block_refuses_a_module_that_needs_torch() -> None:
    result = import_without_torch("torch.nn")
    assert result.returncode != 0
    assert "torch" in result.stderr
