"""Fourth duty: primitives against their definition, on two ranks, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from meshkit.cli.terminal import one_line
from plugins.conformance.checks_capabilities import COLLECTIVES
from plugins.conformance.recorder import Recorder, require
from plugins.conformance.report import Fault, Result, Status
from plugins.sdk.backend import Backend

WORLD_SIZE = 2
TIMEOUT_S = 120.0
"""For both ranks in all, unless a limit is given: most of it is the start of two interpreters with their
framework.
"""
ONE_RANK = "collectives/one_rank"
_LAST_WORDS = 2000


def check_collectives(
    backend: Backend,
    recorder: Recorder,
    *,
    name: str,
    options: Mapping[str, str],
    limit_s: float | None = None,
) -> None:
    """Run every declared primitive; `name` and `options` load the same back end in the ranks' processes.

    limit_s: seconds for all primitives together; None: TIMEOUT_S.
    """
    wanted = _wanted(backend, recorder)
    if not wanted:
        return
    if backend.collectives is None:
        for primitive in wanted:
            _fail(recorder, primitive, Fault.DECLARED_BUT_MISSING, "it is declared; the plugin has none")
        return
    start = time.monotonic()
    ranks = run_ranks(name, options, wanted, timeout_s=TIMEOUT_S if limit_s is None else limit_s)
    _record(recorder, wanted, ranks, (time.monotonic() - start) / len(wanted))


def check_one_rank(backend: Backend, recorder: Recorder) -> None:
    """Run every declared primitive of an executor in a group of which it is the only rank."""
    wanted = _wanted(backend, recorder)
    for primitive in wanted:
        reason = f"it takes {WORLD_SIZE} ranks, each an executor; the address is that of one"
        recorder.add(Result(f"collectives/{primitive}", Status.SKIP_OUT_OF_REACH, reason))
    declared = [each for each in COLLECTIVES if each in backend.capabilities().collectives]
    if declared:
        recorder.run(ONE_RANK, partial(_check_one_rank, backend, declared))


def _check_one_rank(backend: Backend, declared: Sequence[str]) -> str:
    # Only here, since it imports the tensor framework.
    from plugins.conformance.collective_rank import check_rank  # noqa: PLC0415

    meeting = f"file:///tmp/chipmesh-conformance-{uuid.uuid4().hex}"
    outcome = check_rank(backend, declared, rank=0, world_size=1, rendezvous=meeting)
    wrong = [f"{primitive}: {problem}" for primitive, problem in outcome.items() if problem]
    require(not wrong, Fault.WRONG_RESULT, "; ".join(wrong))
    return f"{', '.join(declared)} in a group of one rank"


def _wanted(backend: Backend, recorder: Recorder) -> list[str]:
    """Primitives that are declared and asked for; the others are skipped."""
    declared = backend.capabilities().collectives
    for primitive in COLLECTIVES:
        if primitive not in declared:
            recorder.skip_undeclared(f"collectives/{primitive}", "the report does not list it")
    return [each for each in COLLECTIVES if each in declared and recorder.wants(f"collectives/{each}")]


RankOutcome = Mapping[str, Any]
"""primitive -> "" where it was right, else what was wrong, for those that ended; and where not all did
"error": why the rank ended, or "hangs": how long it was waited for.
"""


def run_ranks(
    name: str, options: Mapping[str, str], primitives: list[str], *, timeout_s: float = TIMEOUT_S
) -> list[RankOutcome]:
    """Start one process for each rank, and wait for all; none is left running."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chipmesh-conformance-")))
        ranks = []
        for rank in range(WORLD_SIZE):
            order = {
                "backend": name,
                "options": dict(options),
                "primitives": primitives,
                "rank": rank,
                "world_size": WORLD_SIZE,
                "rendezvous": f"file://{folder}/meeting",
                "result": f"{folder}/rank-{rank}.json",
            }
            command = [sys.executable, "-m", "plugins.conformance.collective_rank", json.dumps(order)]
            log = stack.enter_context((folder / f"rank-{rank}.log").open("w+"))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(_end, process)
            ranks.append((process, folder / f"rank-{rank}.json", folder / f"rank-{rank}.log"))
        end = time.monotonic() + timeout_s
        return [_await_rank(*rank, end=end, timeout_s=timeout_s) for rank in ranks]


def _await_rank(
    process: subprocess.Popen[bytes], result: Path, log: Path, *, end: float, timeout_s: float
) -> RankOutcome:
    try:
        code = process.wait(max(end - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return {**_read(result), "hangs": f"not done after {timeout_s:g} s"}
    outcome = _read(result)
    if code == 0 or "error" in outcome:
        return outcome
    last_words = one_line(log.read_text(errors="replace")[-_LAST_WORDS:])
    return {**outcome, "error": f"ended with exit code {code}: {last_words}"}


def _read(result: Path) -> RankOutcome:
    outcome: RankOutcome = json.loads(result.read_text()) if result.exists() else {}
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """A rank that is done has left already; one that hangs is ended."""
    if process.poll() is None:
        process.kill()
    process.wait()


def _record(
    recorder: Recorder, primitives: Sequence[str], ranks: Sequence[RankOutcome], duration_s: float
) -> None:
    """Each primitive by all ranks; the first that a rank did not come through was the last that was run."""
    for place, primitive in enumerate(primitives):
        if any(primitive not in outcome for outcome in ranks):
            _record_end(recorder, primitive, ranks, duration_s)
            for rest in primitives[place + 1 :]:
                name, detail = f"collectives/{rest}", f"not run, since {primitive} did not end"
                recorder.add(Result(name, Status.SKIP_NOT_RUN, detail))
            return
        wrong = [
            f"rank {rank}: {outcome[primitive]}" for rank, outcome in enumerate(ranks) if outcome[primitive]
        ]
        if wrong:
            _fail(recorder, primitive, Fault.WRONG_RESULT, "; ".join(wrong), duration_s)
        else:
            detail = f"{WORLD_SIZE} ranks"
            recorder.add(Result(f"collectives/{primitive}", Status.PASS, detail, duration_s=duration_s))


def _record_end(recorder: Recorder, primitive: str, ranks: Sequence[RankOutcome], duration_s: float) -> None:
    """Why ranks did not come through: an error explains it better than the wait of the others for them."""
    errors, hangs = (_by_rank(ranks, key) for key in ("error", "hangs"))
    fault = Fault.RAISED if errors else Fault.TIMED_OUT
    _fail(recorder, primitive, fault, "; ".join(errors + hangs), duration_s)


def _by_rank(ranks: Sequence[RankOutcome], key: str) -> list[str]:
    return [f"rank {rank}: {outcome[key]}" for rank, outcome in enumerate(ranks) if key in outcome]


def _fail(recorder: Recorder, primitive: str, fault: Fault, detail: str, duration_s: float = 0.0) -> None:
    recorder.add(Result(f"collectives/{primitive}", Status.FAIL, detail, fault, duration_s))
