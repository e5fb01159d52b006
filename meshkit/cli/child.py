"""One service as a child process: started, watched by its ready file and its log."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.cli.processes import ProcessRecord, record_process
from meshkit.cli.state import ServiceKind, ServiceRecord, StateDir
from meshkit.cli.terminal import one_line
from meshkit.errors import Internal

LAST_WORDS_BYTES = 64 * 1024
# gRPC's C core logs on its own, for instance "I1129 17:05:55.440620   26460 fork_posix.cc:71] ...".
GRPC_CORE_LINE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+\.cc:\d+\]")
COMMON_READY_FIELDS = ("service", "pid", "address", "http_address")


class Child:
    """A service process and its files. kind is also the `chipmesh` command that runs it.

    within: words put before the command, of a program that takes its place (`nsenter ...`).
    """

    def __init__(
        self,
        name: str,
        kind: ServiceKind,
        *,
        config: Mapping[str, Any],
        state: StateDir,
        within: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._within = within
        self.kind: ServiceKind = kind
        self.log = state.log_file(name)
        self._ready_file = state.ready_file(name)
        self._ready_file.unlink(missing_ok=True)
        config_file = state.config_file(name)
        config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
        self._process = self._spawn(config_file)
        self.identity = self._identify()
        self._tail = LogTail(self.log)

    def _spawn(self, config_file: Path) -> subprocess.Popen[bytes]:
        command = [
            *self._within,
            sys.executable,
            "-m",
            "meshkit.cli",
            self.kind,
            "--config",
            str(config_file),
        ]
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches the launcher, which stops all in order.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _identify(self) -> ProcessRecord:
        record = record_process(self._process.pid)
        if record is None:
            self._process.wait()
            raise Internal(f"{self.name} ended as soon as it was started: {last_error_line(self.log)}")
        return record

    def record(self) -> ServiceRecord:
        """For mesh.json; addresses are there once the ready file is."""
        ready = self.read_ready() or {}
        return ServiceRecord(
            name=self.name,
            kind=self.kind,
            process=self.identity,
            address=ready.get("address"),
            http_address=ready.get("http_address"),
            log=self.log,
            details={name: value for name, value in ready.items() if name not in COMMON_READY_FIELDS},
        )

    def read_ready(self) -> dict[str, Any] | None:
        """The content of the ready file, which appears in one piece; None before."""
        try:
            ready: dict[str, Any] = json.loads(self._ready_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return ready

    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.poll()

    def progress(self) -> Iterator[tuple[str, float]]:
        """(stage, fraction) of every load_progress event logged since the last call."""
        for line in self._tail.new_lines():
            event = _json_object(line)
            if event is not None and event.get("event") == "load_progress":
                yield str(event.get("stage", "loading")), float(event.get("fraction", 0.0))


class LogTail:
    """Reads a growing file line by line, without waiting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Lines completed since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            chunk = log.read()
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", errors="replace").splitlines()


def last_error_line(log: Path) -> str:
    """What a process said last about its end: its last plain line, else its last logged error."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_WORDS_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in reversed([line for line in lines if line.strip() and not GRPC_CORE_LINE.match(line)]):
        event = _json_object(line)
        if event is None:
            return one_line(line)
        if event.get("level") in ("error", "critical"):
            return _describe_logged_error(event)
    return f"it said nothing; its log is {log}"


def _describe_logged_error(event: Mapping[str, Any]) -> str:
    last = str(event.get("exception") or event.get("error") or "").strip().splitlines()
    return one_line(f"{event.get('event')}: {last[-1]}" if last else str(event.get("event")))


def _json_object(line: str) -> dict[str, Any] | None:
    """The line as a JSON object; None where it is something else, as a traceback's lines are."""
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
