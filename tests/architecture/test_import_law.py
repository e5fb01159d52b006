"""Who may import whom: the contracts in pyproject.toml, and the allow-list of the scheduler's core."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE_MAY_IMPORT = sys.stdlib_module_names | {"numpy", "scheduler_svc.core"}


def imported_names(source: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(("." * node.level) + (node.module or ""))
    return names


def is_allowed_in_core(name: str) -> bool:
    """True for the standard library, numpy and the core itself."""
    return (
        name.split(".", maxsplit=1)[0] in CORE_MAY_IMPORT
        or name == "scheduler_svc.core"
        or name.startswith("scheduler_svc.core.")
    )


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports"))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_scheduler_core_imports_the_standard_library_and_numpy_only() -> None:
    sources = sorted((ROOT / "scheduler_svc" / "core").rglob("*.py"))
    assert sources, "scheduler_svc/core holds no code: this law would check nothing"
    offenders = {
        str(source.relative_to(ROOT)): sorted(
            name for name in imported_names(source) if not is_allowed_in_core(name)
        )
        for source in sources
    }
    assert not {source: names for source, names in offenders.items() if names}


@pytest.mark.parametrize(
    "line", ["import grpc", "from meshkit import errors", "import scheduler_svc.config", "import xxhash"]
)
def test_the_core_law_refuses_what_it_should(line: str, tmp_path: Path) -> None:
    source = tmp_path / "planted.py"
    source.write_text(f"def late():\n    {line}\n")
    assert not all(is_allowed_in_core(name) for name in imported_names(source))
