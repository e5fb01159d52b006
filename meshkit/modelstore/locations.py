"""Where models and their descriptions lie on disk."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """CHIPMESH_CACHE_DIR, else XDG_CACHE_HOME/chipmesh, else ~/.cache/chipmesh. Read at each call, never at
    import.
    """
    if own := os.environ.get("CHIPMESH_CACHE_DIR"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "chipmesh"
    return Path.home() / ".cache" / "chipmesh"


def pulled_model_dir(name: str, *, cache_dir: Path) -> Path:
    """The folder that `pull_model(name)` fills; name: also an id of the hub, org/name."""
    return cache_dir / "models" / name.replace("/", "--")
