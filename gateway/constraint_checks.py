"""Asks before a request goes on whether its constraint can be followed: once for each, in a bounded time.

The work is done by `constraint_checker`, a process that is started with the first constraint and replaced
when a form was too much for it. The event loop only waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from dataclasses import asdict
from typing import Any, TypeAlias

from gateway.constraint_limits import UNSUPPORTED, Limits
from gateway.models import ServedModel
from meshkit.constraints.form import Constraint
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError, ResourceExhausted, Unavailable
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

LIMITS = Limits(compile_s=0.25, mask_s=0.1, total_s=1.0)
ANSWER_LIMIT_S = 15.0
"""Of a clock on the wall, the start of the process included: reached only where it gets no processor."""
MAX_WAITING = 64
MAX_REMEMBERED = 512
RETRY_AFTER_S = 1.0
FIELD = "sampling.constraint"
_LINE_BYTES = 1024 * 1024

_Verdict: TypeAlias = "asyncio.Task[MeshError | None]"


class ConstraintChecks:
    """One gateway's checks.

    limits: of processor time for one form. process: the checker, while there is one.
    """

    def __init__(self, *, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self.process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._is_closed = False
        self._verdicts: OrderedDict[str, _Verdict] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ConstraintChecks {len(self._verdicts)} remembered, {self._waiting} waiting>"

    async def check(self, constraint: Constraint, model: ServedModel) -> None:
        """Return where the constraint can be followed with the model's vocabulary.

        Raises:
            InvalidArgument: (CONSTRAINT_INVALID) it is malformed, nothing fits it, or it uses what is not
                supported; (CONSTRAINT_TOO_COMPLEX) it takes too much time or memory.
            FailedPrecondition: the model's vocabulary cannot be used for it.
            ResourceExhausted, Unavailable: it could not be checked now.
        """
        key = hashlib.sha256(f"{model.name}\0{constraint.kind}\0{constraint.text}".encode()).hexdigest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = asyncio.create_task(self._judge(key, constraint, model))
        self._verdicts.move_to_end(key)
        self._forget_oldest()
        # Others may wait for the same one, so it goes on when one of them goes away.
        error = await asyncio.shield(verdict)
        if error is not None:
            raise error

    async def close(self) -> None:
        """End the process; what is being checked ends as Unavailable."""
        self._is_closed = True
        process, self.process = self.process, None
        if process is not None:
            await _end(process)
        await asyncio.gather(*self._verdicts.values(), return_exceptions=True)

    def _forget_oldest(self) -> None:
        for key in list(self._verdicts)[: len(self._verdicts) - MAX_REMEMBERED]:
            if self._verdicts[key].done():
                del self._verdicts[key]

    async def _judge(self, key: str, constraint: Constraint, model: ServedModel) -> MeshError | None:
        if self._waiting >= MAX_WAITING:
            error: MeshError | None = ResourceExhausted(
                f"{self._waiting} constraints wait to be checked already, which is the limit; try again in "
                f"{RETRY_AFTER_S:g} s",
                field=FIELD,
                reason="CONSTRAINT_CHECKS_FULL",
                retry_after_s=RETRY_AFTER_S,
            )
        else:
            self._waiting += 1
            try:
                async with self._turn:
                    error = await self._ask(constraint, model)
            finally:
                self._waiting -= 1
        if isinstance(error, (ResourceExhausted, Unavailable)):
            self._verdicts.pop(key, None)
        return error

    async def _ask(self, constraint: Constraint, model: ServedModel) -> MeshError | None:
        if self._is_closed:
            return Unavailable(
                "this gateway is shutting down", reason="DRAINING", retry_after_s=RETRY_AFTER_S
            )
        text = model.require_text(FIELD)
        question = {
            "model": {
                "tokenizer_file": str(text.tokenizer.file),
                "vocab_size": model.vocab_size,
                "eos_token_ids": model.eos_token_ids,
            },
            "constraint": asdict(constraint),
            "limits": asdict(self._limits),
        }
        try:
            answer = await asyncio.wait_for(self._answer(question), ANSWER_LIMIT_S)
        except (asyncio.TimeoutError, OSError) as error:
            await self._replace()
            return Unavailable(
                f"the constraint could not be checked: {type(error).__name__}, after at most "
                f"{ANSWER_LIMIT_S:g} s; try again in {RETRY_AFTER_S:g} s",
                reason="CONSTRAINT_CHECK_FAILED",
                retry_after_s=RETRY_AFTER_S,
            )
        return await self._read(answer)

    async def _answer(self, question: dict[str, Any]) -> bytes:
        """A line, or nothing where the process has ended."""
        process = self.process
        if process is None or process.returncode is not None:
            process = self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway.constraint_checker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE_BYTES,
            )  # fmt: skip
        if process.stdin is None or process.stdout is None:
            raise OSError("the checker has no pipes")
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        return await process.stdout.readline()

    async def _read(self, answer: bytes) -> MeshError | None:
        if not answer and self._is_closed:
            return Unavailable(
                "this gateway is shutting down", reason="DRAINING", retry_after_s=RETRY_AFTER_S
            )
        if not answer:
            status = await self._replace()
            log.warning("a constraint was too much for its checker", status=status)
            return InvalidArgument(
                f"{FIELD} is too complex: compiling it and finding what may come next takes more than "
                f"{self._limits.total_s:g} s or too much memory; make it smaller",
                field=FIELD,
                reason="CONSTRAINT_TOO_COMPLEX",
            )
        said: dict[str, Any] = json.loads(answer)
        if not said:
            return None
        kind = FailedPrecondition if said["reason"] == UNSUPPORTED else InvalidArgument
        message = str(said["message"]).replace("constraint", FIELD, 1)
        return kind(message, field=f"sampling.{said['field']}", reason=said["reason"])

    async def _replace(self) -> int | None:
        """End the process, if it has not ended; the next question starts another. How it ended."""
        process, self.process = self.process, None
        return None if process is None else await _end(process)


async def _end(process: asyncio.subprocess.Process) -> int | None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            log.debug("the checker has ended by itself", pid=process.pid)
    return await process.wait()
