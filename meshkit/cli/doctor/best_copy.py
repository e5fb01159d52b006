"""The best memory bandwidth ever measured on this host, kept in the state folder: what "idle" means here."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

FILE = "memory-bandwidth.json"


def recall(folder: Path) -> float | None:
    """Bytes per second; None where none was kept for this host."""
    try:
        kept = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = kept.get(platform.node()) if isinstance(kept, dict) else None
    return float(value) if isinstance(value, (int, float)) else None


def keep(folder: Path, rate: float) -> bool:
    """Keeps `rate` where it is better than what is kept; False where the folder cannot be written."""
    if rate <= (recall(folder) or 0.0):
        return True
    temporary = folder / f".{FILE}.{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps({platform.node(): rate}), encoding="utf-8")
        os.replace(temporary, folder / FILE)
    except OSError:
        return False
    return True
