"""A spawned process that runs a plugin for us: it may hang or crash, and its parent goes on and says so.

Messages are JSON objects over a pipe. What the plugin and its libraries print goes to a file, whose end is
quoted when the process dies.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import connection
from types import TracebackType
from typing import Any

Message = Mapping[str, Any]
_LAST_WORDS_BYTES = 600
_FIRST_WAIT_S = 5.0
"""How long a process that closed its pipe has to end by itself before it is killed."""


class ProcessSilent(Exception):
    """No message came in time; the process still runs."""


class ProcessDied(Exception):
    """The process ended without a last message; the text says how, and what it printed last."""


class Channel:
    """The child's end."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def send(self, message: Message) -> None:
        """Hand one JSON object to the parent."""
        self._pipe.send_bytes(json.dumps(message).encode())


class Spawned:
    """Runs `target(channel, *args)` in a fresh interpreter; `target` is a module's function. On leaving the
    `with` block the process and its children are gone.
    """

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._output = tempfile.NamedTemporaryFile(prefix="chipmesh-", suffix=".log")  # noqa: SIM115 - see stop
        self._process = context.Process(target=_run, args=(target, child_end, self._output.name, args))
        self._process.start()
        child_end.close()

    def __enter__(self) -> Spawned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def receive(self, timeout_s: float) -> Message:
        """The next message.

        Raises:
            ProcessSilent: none came within `timeout_s` seconds. ProcessDied: none will come.
        """
        # The end of the process too: a grandchild that was forked may hold the pipe open.
        if not connection.wait([self._pipe, self._process.sentinel], timeout_s):
            raise ProcessSilent(f"no answer within {timeout_s:g} s")
        if not self._pipe.poll():
            raise ProcessDied(self._how_it_ended())
        try:
            message: Message = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise ProcessDied(self._how_it_ended()) from None
        return message

    def stop(self) -> None:
        """Kill the process with its children, and wait for it. Idempotent."""
        _kill_group(self._process.pid)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()
        self._output.close()

    def _how_it_ended(self) -> str:
        self._process.join(_FIRST_WAIT_S)
        code = self._process.exitcode
        if code is None:
            how = "the process closed its pipe and hangs"
        elif code < 0:
            how = f"the process was killed by {signal.Signals(-code).name}"
        else:
            how = f"the process ended with exit code {code}"
        words = " ".join(self._last_words().split())
        return f"{how}; its last words: {words}" if words else f"{how} without a word"

    def _last_words(self) -> str:
        size = os.path.getsize(self._output.name)
        with open(self._output.name, "rb") as output:
            output.seek(max(0, size - _LAST_WORDS_BYTES))
            return output.read().decode("utf-8", errors="replace")


def _kill_group(pid: int | None) -> None:
    """The child leads a group of its own, so what a vendor's library has started goes with it."""
    if pid is None:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # It has ended, or was not yet far enough to lead a group.


def _run(
    target: Callable[..., None], pipe: connection.Connection, output: str, args: tuple[Any, ...]
) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Vendors' libraries print from C: both descriptors are redirected, not sys.stdout alone.
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    target(Channel(pipe), *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
