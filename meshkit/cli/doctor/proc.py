"""What /proc and the control groups of this host tell of processes. Unreadable is unknown, never an error."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshkit.address import TcpAddress, UnixAddress, parse_listen
from meshkit.cli.doctor.facts import GroupLimits, Owner, ProcessFacts

LISTEN = "0A"
UNLIMITED = 1 << 60
"""Version 1 of control groups writes "no limit" as a number beyond any memory."""


@dataclass(frozen=True)
class Proc:
    """root: where `proc` and `sys` lie; another one than / only in tests."""

    root: Path = Path("/")

    def read(self, path: str) -> str:
        """The file's text; "" where it is not there or may not be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def pids(self) -> Iterator[int]:
        """All processes that this one can see."""
        for name in os.listdir(self.root / "proc"):
            if name.isdigit():
                yield int(name)

    def state_of(self, pid: int) -> str:
        """R, S, D, T, ...; "" where it is gone or a zombie."""
        fields = stat_fields(self.read(f"proc/{pid}/stat"))
        return "" if not fields or fields[0] in ("Z", "X") else fields[0]

    def command_of(self, pid: int) -> str:
        """Its command line, or the name of the program in brackets."""
        words = self.read(f"proc/{pid}/cmdline").replace("\0", " ").strip()
        return words or f"[{self.read(f'proc/{pid}/comm').strip()}]"

    def parent_of(self, pid: int) -> int:
        """0 where it is gone."""
        fields = stat_fields(self.read(f"proc/{pid}/stat"))
        return int(fields[1]) if fields else 0

    # ------------------------------------------------------------ one process

    def facts_of(
        self, pid: int, *, owner: str, service: str, kind: Literal["service", "executor"]
    ) -> ProcessFacts:
        """Everything about a process that limits it."""
        status = _pairs(self.read(f"proc/{pid}/status"))
        return ProcessFacts(
            owner=owner,
            service=service,
            kind=kind,
            pid=pid,
            state=self.state_of(pid),
            open_files=self._count_files(pid),
            files_limit=self._files_limit(pid),
            resident=_kilobytes(status.get("VmRSS")),
            swapped=_kilobytes(status.get("VmSwap")),
            threads_wanted=self._threads_wanted(pid),
            processors=_count_cpus(status.get("Cpus_allowed_list", "")),
            groups=self.limits_of(pid),
        )

    def _count_files(self, pid: int) -> int | None:
        try:
            return len(os.listdir(self.root / f"proc/{pid}/fd"))
        except OSError:
            return None

    def _files_limit(self, pid: int) -> int | None:
        """The soft limit; None: none, or unreadable."""
        for line in self.read(f"proc/{pid}/limits").splitlines():
            if line.startswith("Max open files"):
                word = line.split()[3]
                return int(word) if word.isdigit() else None
        return None

    def _threads_wanted(self, pid: int) -> int | None:
        for word in self.read(f"proc/{pid}/environ").split("\0"):
            name, _, value = word.partition("=")
            if name == "OMP_NUM_THREADS" and value.isdigit():
                return int(value)
        return None

    # ------------------------------------------------------------ control groups, versions 1 and 2

    def limits_of(self, pid: int) -> GroupLimits:
        """The tightest limits of its groups and their ancestors."""
        memory, pids, cpu = (self._folders(pid, name) for name in ("memory", "pids", "cpu"))
        limit, folder = self._tightest(memory, ("memory.max", "memory.limit_in_bytes"))
        pids_limit, pids_folder = self._tightest(pids, ("pids.max",))
        quota, throttled = self._quota(cpu)
        return GroupLimits(
            memory_limit=limit,
            memory_used=self._memory_used(folder) if folder is not None else None,
            memory_file=str(folder or ""),
            oom_kills=max((self._oom_kills(each) for each in memory), default=0),
            pids_limit=pids_limit,
            pids_used=self._number(pids_folder / "pids.current") or 0 if pids_folder else 0,
            quota_cores=quota,
            throttled_share=throttled,
        )

    def _folders(self, pid: int, controller: str) -> list[Path]:
        """Folders of a controller, innermost first; paths below the root."""
        found: list[Path] = []
        for line in self.read(f"proc/{pid}/cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                mount = Path("sys/fs/cgroup")
            elif controller in controllers.split(","):
                mount = Path("sys/fs/cgroup") / controller
            else:
                continue
            inner = mount / path.lstrip("/")
            # Inside a container the path may be the host's, of which only the mount itself is visible.
            found += [each for each in (inner, *inner.parents) if each == mount or mount in each.parents]
        return found

    def _tightest(self, folders: Iterable[Path], names: Iterable[str]) -> tuple[int | None, Path | None]:
        limits = [
            (limit, folder)
            for folder in folders
            for name in names
            if (limit := self._number(folder / name)) is not None and limit < UNLIMITED
        ]
        return min(limits, key=lambda each: each[0], default=(None, None))

    def _number(self, file: Path) -> int | None:
        text = self.read(str(file)).strip()
        return int(text) if text.lstrip("-").isdigit() else None

    def _memory_used(self, folder: Path) -> int | None:
        used = self._number(folder / "memory.current") or self._number(folder / "memory.usage_in_bytes")
        if used is None:
            return None
        stat = _numbers(self.read(str(folder / "memory.stat")))
        return used - min(used, stat.get("total_inactive_file", stat.get("inactive_file", 0)))

    def _oom_kills(self, folder: Path) -> int:
        events = _numbers(self.read(str(folder / "memory.events")))
        events |= _numbers(self.read(str(folder / "memory.oom_control")))
        return events.get("oom_kill", 0)

    def _quota(self, folders: Iterable[Path]) -> tuple[float | None, float]:
        """Processors that the quota comes to, and the share of periods that were cut short by it."""
        found: list[tuple[float, float]] = []
        for folder in folders:
            words = self.read(str(folder / "cpu.max")).split()
            quota = (
                int(words[0]) if words and words[0].isdigit() else self._number(folder / "cpu.cfs_quota_us")
            )
            period = int(words[1]) if len(words) > 1 else self._number(folder / "cpu.cfs_period_us")
            if quota is None or quota <= 0 or not period:
                continue
            stat = _numbers(self.read(str(folder / "cpu.stat")))
            share = stat.get("nr_throttled", 0) / max(1, stat.get("nr_periods", 0))
            found.append((quota / period, share))
        return min(found, default=(None, 0.0), key=lambda each: each[0] or 0.0)

    # ------------------------------------------------------------ who listens

    def owner_of(self, address: str) -> Owner | None:
        """The process of this host that listens there; None: none, none of ours to see, or another host's."""
        listen = parse_listen(address)
        if isinstance(listen, UnixAddress) or not _is_of_this_host(listen.host):
            return None
        inodes = self._listening_inodes(listen)
        return self._holder_of(inodes) if inodes else None

    def _listening_inodes(self, address: TcpAddress) -> set[str]:
        found: set[str] = set()
        for table in ("proc/net/tcp", "proc/net/tcp6"):
            for line in self.read(table).splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == address.port:
                    found.add(fields[9])
        return found

    def _holder_of(self, inodes: set[str]) -> Owner | None:
        wanted = {f"socket:[{inode}]" for inode in inodes}
        for pid in self.pids():
            folder = self.root / f"proc/{pid}/fd"
            try:
                if any(os.readlink(folder / name) in wanted for name in os.listdir(folder)):
                    return Owner(pid, self.command_of(pid))
            except OSError:
                continue  # It has ended meanwhile, or belongs to another user.
        return None


def stat_fields(text: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on: the command before them may hold spaces."""
    return text.rpartition(")")[2].split()


def _pairs(text: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _numbers(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _kilobytes(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0


def _count_cpus(text: str) -> int | None:
    """ "0-3,8" as 5."""
    if not text:
        return None
    spans = [part.partition("-") for part in text.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def _is_of_this_host(host: str) -> bool:
    """Loopback, a wildcard, or an address that a socket of this host can be bound to."""
    if host in ("localhost", "::1", "::", "0.0.0.0") or host.startswith("127."):
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True
