"""The library that we are compared with is used for that alone."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("meshkit", "gateway", "scheduler_svc", "worker_svc", "plugins", "benchmarks", "chaos", "tests")


def imports_transformers(source: Path) -> bool:
    """At any depth of its code."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.partition(".")[0] == "transformers" for name in names):
            return True
    return False


def test_nothing_else_imports_transformers() -> None:
    sources = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(sources) > 200
    guilty = [file for file in sources if imports_transformers(file)]
    assert {file.parent for file in guilty} <= {ROOT / "tests" / "parity"}
    assert guilty, "this folder's own import is not found"
