"""Memory and processors that this process may use of its host: control groups (v1, v2) and /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryLimit:
    """In bytes. `source` says where the total comes from, for people."""

    total_bytes: int
    free_bytes: int
    source: str


def read_memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest of the host's memory and the limits of this process's control group and its ancestors.

    root: where `proc` and `sys` lie; another one than / only in tests.

    Raises:
        OSError, ValueError: /proc/meminfo cannot be read.
    """
    info = _meminfo(root / "proc/meminfo")
    best = MemoryLimit(info["MemTotal"], info["MemAvailable"], "MemTotal")
    for folder, limit_file, usage_file in _group_folders(root):
        limit = _read_bytes(folder / limit_file)
        if limit is None or limit >= best.total_bytes:
            continue
        used = _read_bytes(folder / usage_file) or 0
        # Page cache counts as used in a group but is given back on demand.
        used -= min(used, _reclaimable(folder / "memory.stat"))
        free = max(0, min(limit - used, info["MemAvailable"]))
        best = MemoryLimit(limit, free, str(folder / limit_file))
    return best


def usable_cpus() -> int:
    """Processors that the scheduler may run this process on."""
    return len(os.sched_getaffinity(0))


def processor_name(root: Path = Path("/")) -> str:
    """The model name that the processor gives itself; "unknown" where /proc/cpuinfo has none (some ARM)."""
    for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "cpu model", "hardware") and value.strip():
            return value.strip()
    return "unknown"


def _meminfo(file: Path) -> dict[str, int]:
    """Bytes by name."""
    sizes: dict[str, int] = {}
    for line in file.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) == 2 and fields[1] == "kB":
            sizes[name] = int(fields[0]) * 1024
    missing = {"MemTotal", "MemAvailable"} - sizes.keys()
    if missing:
        raise ValueError(f"{file} does not tell {', '.join(sorted(missing))}")
    return sizes


def _group_folders(root: Path) -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of this process's memory groups, innermost first."""
    found: list[tuple[Path, str, str]] = []
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # a kernel without control groups
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _with_ancestors(mount, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _with_ancestors(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return found


def _with_ancestors(mount: Path, path: str, limit: str, usage: str) -> list[tuple[Path, str, str]]:
    # Inside a container the path may be the host's, of which only the mount itself is visible.
    inner = mount / path.lstrip("/")
    folders = [inner, *(parent for parent in inner.parents if parent == mount or mount in parent.parents)]
    return [(folder, limit, usage) for folder in folders]


def _read_bytes(file: Path) -> int | None:
    """A number of bytes; None where the file is not there or says "max"."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if text == "max" else int(text)


def _reclaimable(file: Path) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    values = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    return values.get("total_inactive_file", values.get("inactive_file", 0))
