"""A process of its own that compiles forms of outputs, so that one which takes for ever takes only it along.

No limit of the compiler bounds all that a client can write (`((a{1000}){1000}){1000}` takes minutes and
gigabytes), and a thread cannot be stopped. So the gateway asks this process, one form after the other: a
line of JSON on stdin, a line on stdout. The kernel ends it where a form takes more than its processor time or
memory; the gateway starts another.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gateway.constraint_limits import UNSUPPORTED, Limits
from meshkit.constraints.form import Constraint
from meshkit.constraints.matching import FIELD, TOO_COMPLEX, ConstraintCompiler, WordArray
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError

EXTRA_MEMORY_BYTES = 640 * 1024**2
NICENESS = 5
WALK_TOKENS = 32
"""So many tokens of an output are tried: what is slow is mostly slow from the beginning."""


def judge(
    compiler: ConstraintCompiler,
    constraint: Constraint,
    limits: Limits,
    *,
    clock: Callable[[], float] = time.process_time,
) -> None:
    """Compile a form and take an output some way through it.

    Raises:
        InvalidArgument: it is malformed, nothing fits it, or it takes longer than it may.
    """
    began = clock()
    matcher = compiler.compile(constraint)
    _check_time("compiling it", clock() - began, limits.compile_s)
    words = compiler.new_words(1)[0]
    choose = random.Random(0)
    for _ in range(WALK_TOKENS):
        if matcher.is_complete:
            return
        began = clock()
        matcher.fill(words)
        _check_time("finding what may come next", clock() - began, limits.mask_s)
        matcher.consume((choose.choice(_set_bits(words)),))


def _set_bits(words: WordArray) -> list[int]:
    bits: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return bits


def _check_time(what: str, seconds: float, limit_s: float) -> None:
    if seconds > limit_s:
        raise InvalidArgument(
            f"{FIELD} is too complex: {what} takes {seconds:.2f} s, the limit is {limit_s:g} s; "
            "make it smaller",
            field=FIELD,
            reason=TOO_COMPLEX,
        )


class _Checker:
    def __init__(self) -> None:
        self._compilers: dict[str, ConstraintCompiler] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """{} for a good form, else what is wrong with it."""
        try:
            compiler = self._compiler(question["model"])
            limits = Limits(**question["limits"])
            # What it does by default is to end the process, wherever that is.
            signal.setitimer(signal.ITIMER_PROF, limits.total_s)
            judge(compiler, Constraint(**question["constraint"]), limits)
        except MeshError as error:
            return {"message": error.message, "field": error.field, "reason": error.reason}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        return {}

    def _compiler(self, model: dict[str, Any]) -> ConstraintCompiler:
        file = model.pop("tokenizer_file")
        if file not in self._compilers:
            try:
                self._compilers[file] = ConstraintCompiler(Path(file), **model)
            except FailedPrecondition as error:
                raise FailedPrecondition(error.message, field=FIELD, reason=UNSUPPORTED) from error
        return self._compilers[file]


def _bound_memory() -> None:
    """Room for vocabularies and forms beyond what the interpreter has mapped by now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + EXTRA_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer line by line until stdin ends."""
    # Ctrl-C is for the gateway, which closes the pipe when its requests have ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Streams that go on before requests that begin.
    os.nice(NICENESS)
    _bound_memory()
    checker = _Checker()
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(checker.answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
