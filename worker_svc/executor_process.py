"""One executor's process, seen from its supervisor: spawned, told, waited for, ended by its pid."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from meshkit.errors import DeadlineExceeded, FailedPrecondition, MeshError, Unavailable
from meshkit.telemetry.logging import get_logger
from worker_svc.executor.settings import ExecutorSettings

log = get_logger(__name__)

EXECUTOR_MODULE = "worker_svc.executor"
REFUSED_GRACE_S = 2.0
"""How long an executor that refused to start may take to end by itself."""


class ExecutorFailed(FailedPrecondition):
    """An executor did not become ready; the message carries its own cause."""


class ExecutorProcess:
    """A child process that serves the device-plugin contract at `address` until its stdin closes."""

    def __init__(self, process: asyncio.subprocess.Process, *, instance_id: str) -> None:
        self._process = process
        self.instance_id = instance_id
        self.address = ""
        self._session_ended = False

    def __repr__(self) -> str:
        return (
            f"<ExecutorProcess pid={self.pid} instance={self.instance_id} status={self._process.returncode}>"
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once its end was noticed."""
        return self._process.returncode is None

    async def wait(self) -> str:
        """Return when the process has ended: how, for people."""
        return describe_status(await self._process.wait())

    async def drain(self, *, timeout_s: float) -> bool:
        """Ask to be told when no slot is in use any more; False if that was not so after `timeout_s`
        seconds.
        """
        if not await self._send(b"drain\n"):
            return True  # It has gone, and its slots with it.
        try:
            await asyncio.wait_for(self._pipes()[1].readline(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def stop(self, *, timeout_s: float) -> None:
        """Close the pipe and wait for the end; after `timeout_s` seconds kill it, by pid."""
        self._pipes()[0].close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except asyncio.TimeoutError:
            log.warning("executor does not end, killed", pid=self.pid, timeout_s=timeout_s)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to it and to what its plugin has started in its session, and wait: a helper process of a
        vendor's runtime would hold the chip. After its end: only to what it left. Idempotent.
        """
        if self._session_ended:
            return  # Its id may be another's by now.
        self._session_ended = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("executor has left nothing", pid=self.pid)
        await self._process.wait()

    def _pipes(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout

    async def _send(self, line: bytes) -> bool:
        """Write to its stdin; False where nobody reads there any more."""
        stdin = self._pipes()[0]
        try:
            stdin.write(line)
            await stdin.drain()
        except (
            ConnectionError,
            RuntimeError,
        ) as error:  # uvloop says RuntimeError where asyncio's loop does not
            log.debug("executor does not read", pid=self.pid, error=str(error))
            return False
        return True

    async def _take_ready_line(self, settings: ExecutorSettings) -> None:
        # One that has ended already says why by its first line or its status.
        await self._send(settings.model_dump_json().encode() + b"\n")
        line = await self._pipes()[1].readline()
        if not line:
            raise ExecutorFailed(
                f"the executor {await self.wait()} while it loaded backend {settings.backend!r}; its last "
                "words are on stderr",
                reason="EXECUTOR_DIED",
            )
        answer = _read_answer(line)
        if "error" in answer:
            # It has said why it ends; a thread that a plugin has left behind may keep it from doing so.
            await self.stop(timeout_s=REFUSED_GRACE_S)
            raise _cause(answer["error"])
        self.address = str(answer["address"])


async def spawn_executor(
    settings: ExecutorSettings, *, python: str | None, environment: Mapping[str, str], timeout_s: float
) -> ExecutorProcess:
    """Start an executor and wait until it serves.

    python: interpreter; None: this one. environment: set over this process' own before the start.

    Raises:
        ExecutorFailed: it ended or refused; the message carries its cause. DeadlineExceeded: it was not
        ready in `timeout_s` seconds; it was killed.
    """
    interpreter = python or sys.executable
    try:
        process = await asyncio.create_subprocess_exec(
            interpreter, "-m", EXECUTOR_MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
            # A Ctrl-C on the terminal is for the supervisor, which then ends its executor in order.
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ExecutorFailed(
            f"executor.python: {interpreter} cannot be started: {error.strerror}",
            field="executor.python",
            reason="NO_INTERPRETER",
        ) from error
    executor = ExecutorProcess(process, instance_id=settings.instance_id)
    try:
        await asyncio.wait_for(executor._take_ready_line(settings), timeout_s)
    except asyncio.TimeoutError as error:
        raise DeadlineExceeded(
            f"the executor was not ready after {timeout_s:g} s: backend {settings.backend!r} still loads or "
            "hangs; it was killed. Raise executor.start_timeout_s if its runtime is slow",
            field="executor.start_timeout_s",
        ) from error
    finally:
        if not executor.address:
            await executor.kill()
    return executor


def describe_status(status: int) -> str:
    """A process' end in words."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _read_answer(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not answer.keys() & {"address", "error"}:
        raise Unavailable(f"the executor said {line[:200]!r} where a ready line was expected")
    return answer


def _cause(error: Mapping[str, Any]) -> MeshError:
    """The executor's own error, as one of ours: its start failed, whatever the code was there."""
    return ExecutorFailed(
        str(error.get("message", "")),
        field=error.get("field"),
        reason=error.get("reason"),
        cause_code=error.get("code"),
    )
