"""What this host gives, and how much of it others take while the doctor looks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshkit.cli.doctor.facts import Busy, HostFacts
from meshkit.cli.doctor.proc import Proc, stat_fields

COPY_BYTES = 64 * 1024 * 1024
"""Larger than the caches of most processors."""
COPIES = 6
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MOST_NAMED = 5
IDLE_FIELDS = (3, 4)
"""Of the line "cpu" of /proc/stat: idle, iowait. Steal is field 7; 8 and 9 are counted in 0 and 1 already."""
STEAL_FIELD = 7


@dataclass(frozen=True)
class Ticks:
    """One look: when, the whole host's processor time in ticks, and each process'."""

    at: float
    busy: int
    stolen: int
    by_pid: Mapping[int, int]


def look(proc: Proc) -> Ticks:
    """Processor time used so far."""
    words = next(
        (line.split()[1:] for line in proc.read("proc/stat").splitlines() if line.startswith("cpu ")), []
    )
    values = [int(word) for word in words[:8]] + [0] * (8 - len(words[:8]))
    busy = sum(value for index, value in enumerate(values) if index not in (*IDLE_FIELDS, STEAL_FIELD))
    by_pid = {}
    for pid in proc.pids():
        fields = stat_fields(proc.read(f"proc/{pid}/stat"))
        if fields:
            by_pid[pid] = int(fields[11]) + int(fields[12])
    return Ticks(time.monotonic(), busy, values[STEAL_FIELD], by_pid)


def family_of(proc: Proc, roots: Collection[int]) -> set[int]:
    """These processes and all that they have started."""
    parents = {pid: proc.parent_of(pid) for pid in proc.pids()}
    family = set(roots)
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return family


def describe_host(
    proc: Proc, before: Ticks, after: Ticks, *, ours: Collection[int], copy_rate: float, best: float | None
) -> HostFacts:
    """ours: processes of the mesh, the doctor and what it has started. Between the two looks."""
    seconds = max(1e-3, after.at - before.at)
    used = {
        pid: (ticks - before.by_pid.get(pid, 0)) / TICKS_PER_S / seconds
        for pid, ticks in after.by_pid.items()
        if pid in before.by_pid
    }
    foreign = {pid: share for pid, share in used.items() if pid not in ours}
    own = sum(share for pid, share in used.items() if pid in ours)
    # The host's sum also has what a container does not see; where it is not kept (or hidden), what is seen.
    total = (after.busy - before.busy) / TICKS_PER_S / seconds
    busiest = sorted(foreign.items(), key=lambda each: -each[1])[:MOST_NAMED]
    memory = _meminfo(proc)
    shm, shm_free = _shared_memory(proc.root / "dev/shm")
    return HostFacts(
        processors=os.cpu_count() or 1,
        memory=memory.get("MemTotal", 0),
        swap=memory.get("SwapTotal", 0),
        swap_used=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        shm=shm,
        shm_free=shm_free,
        others=max(total - own, sum(foreign.values()), 0.0),
        stolen=(after.stolen - before.stolen) / TICKS_PER_S / seconds,
        busiest=tuple(Busy(pid, proc.command_of(pid), share) for pid, share in busiest if share > 0.01),
        copy_bytes_per_s=copy_rate,
        best_copy_bytes_per_s=best,
    )


def measure_copy(clock: Callable[[], float] = time.thread_time) -> float:
    """Bytes read and written per second of this thread's own processor time, the best of COPIES: what other
    processes take of the processors does not count, what they take of the memory's bandwidth does.
    """
    source = np.ones(COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(COPIES):
        began = clock()
        np.copyto(target, source)
        best = min(best, max(clock() - began, 1e-6))
    return 2 * COPY_BYTES / best


def _meminfo(proc: Proc) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for line in proc.read("proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return sizes


def _shared_memory(folder: Path) -> tuple[int | None, int | None]:
    try:
        usage = os.statvfs(folder)
    except OSError:
        return None, None
    return usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
