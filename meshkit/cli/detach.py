"""Starts the launcher as a process of its own session and follows its events until the mesh is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
from pydantic import ValidationError

from meshkit.cli.child import LogTail, last_error_line
from meshkit.cli.events import LaunchEvent, Report
from meshkit.cli.options import MeshOptions
from meshkit.cli.processes import POLL_S
from meshkit.cli.state import STATE_DIR_VARIABLE, MeshRecord, StateDir
from meshkit.errors import FailedPrecondition, MeshError

LAUNCH_COMMAND = "launch"
STOP_WAIT_S = 60.0


def run_detached(options: MeshOptions, *, state: StateDir, report: Report) -> MeshRecord:
    """Returns when the mesh is up; the launcher then lives on without this terminal.

    Raises:
        MeshError: what the launcher failed with. Nothing is left running then, nor after Ctrl-C.
    """
    state.refuse_live_mesh()
    launcher = _spawn_launcher(options, state)
    try:
        for event in _events(launcher, state):
            report(event)
            if event.kind == "up" and event.mesh is not None:
                return event.mesh
            if event.kind == "failed" and event.error is not None:
                raise _error_of(event.error)
    except BaseException:
        _end(launcher)
        raise
    raise FailedPrecondition(
        f"the detached launcher ended: {last_error_line(state.launch_log)} (log: {state.launch_log})"
    )


def _spawn_launcher(options: MeshOptions, state: StateDir) -> subprocess.Popen[bytes]:
    state.options_file.write_text(options.model_dump_json(indent=2), encoding="utf-8")
    command = [sys.executable, "-m", "meshkit.cli", LAUNCH_COMMAND, "--options", str(state.options_file)]
    with state.launch_log.open("wb") as log:
        return subprocess.Popen(
            command,
            # The folder may be another one than ours.
            env={**os.environ, STATE_DIR_VARIABLE: str(state.root)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _events(launcher: subprocess.Popen[bytes], state: StateDir) -> Iterator[LaunchEvent]:
    """Events as the launcher logs them, until it has ended and everything was read."""
    tail = LogTail(state.launch_log)
    ended = False
    while not ended:
        ended = launcher.poll() is not None
        for line in tail.new_lines():
            event = _parse(line)
            if event is not None:
                yield event
        time.sleep(POLL_S)


def _parse(line: str) -> LaunchEvent | None:
    """None for a line that is no event: the log also holds what libraries print."""
    try:
        return LaunchEvent.model_validate_json(line)
    except ValidationError:
        return None


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Stops the launcher, which stops its services."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            launcher.kill()


def _error_of(description: dict[str, object]) -> MeshError:
    """The launcher's error, as it would have been raised here."""
    field = description.get("field")
    error = MeshError(
        str(description.get("message")),
        field=None if field is None else str(field),
        reason=str(description.get("reason")),
    )
    error.code = grpc.StatusCode[str(description.get("code"))]
    return error
