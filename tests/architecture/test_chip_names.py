"""No chip is named outside plugins/ and deploy/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gateway", "scheduler_svc", "worker_svc", "meshkit", "protos")
CHIP_NAMES = re.compile(r"\b(cuda|kunlun|xpu|nccl|xccl)\b", re.IGNORECASE)


def lines_naming_a_chip(text: str) -> list[int]:
    """Line numbers, from 1."""
    return [number for number, line in enumerate(text.splitlines(), start=1) if CHIP_NAMES.search(line)]


def test_no_chip_is_named_outside_plugins_and_deploy() -> None:
    sources = [
        path
        for folder in FOLDERS
        for suffix in ("py", "proto")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    assert any(path.suffix == ".proto" for path in sources)
    assert any(path.suffix == ".py" for path in sources)
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources
        for line in lines_naming_a_chip(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_search_finds_a_planted_name() -> None:
    assert lines_naming_a_chip('first\nif device == "CUDA":\n') == [2]
