"""The generated code is what protos/generate.py writes, and imports on the oldest protobuf we promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
OLDEST_PYTHON = ROOT / ".venv-protos" / "bin" / "python"
IMPORT_ALL = """
import importlib, sys, google.protobuf
for name in sys.argv[1:]:
    importlib.import_module(name)
print(google.protobuf.__version__)
"""


@pytest.fixture(scope="module")
def freshness() -> subprocess.CompletedProcess[str]:
    """The outcome of `generate.py --check`, which makes the compiler's environment if it is missing."""
    command = [sys.executable, str(PROTOS / "generate.py"), "--check"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# The first run on a machine installs the compiler.
@pytest.mark.timeout(300)
def test_generated_code_is_fresh(freshness: subprocess.CompletedProcess[str]) -> None:
    assert freshness.returncode == 0, freshness.stdout + freshness.stderr


@pytest.mark.usefixtures("freshness")
def test_generated_code_imports_on_protobuf_6_33() -> None:
    modules = [
        path.relative_to(PROTOS).with_suffix("").as_posix().replace("/", ".")
        for path in PROTOS.glob("chipmesh/**/*_pb2*.py")
    ]
    assert modules
    environment = {**os.environ, "PYTHONPATH": str(PROTOS)}
    command = [str(OLDEST_PYTHON), "-W", "error", "-c", IMPORT_ALL, *modules]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("6.33.")
