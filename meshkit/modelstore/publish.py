"""Puts a finished folder in its place in one step, so that a reader never sees half of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def publish_folder(target: Path, *, build: Callable[[Path], None]) -> Path:
    """Have `build` fill a temporary folder beside `target`, then rename it to `target`.

    Returns `target`. When another process published first, its folder stays and ours is dropped:
    both were built from the same source. What `build` raises passes through, and nothing is left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    workdir = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        # mkdtemp makes 0700; a cache that several users share has to be readable.
        workdir.chmod(0o755)
        build(workdir)
        try:
            os.rename(workdir, target)
        except OSError:
            # rename(2) refuses a target that is not empty: somebody was faster. Anything else is an error.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    return target
