"""Fourth duty: primitives against their definition, on two ranks, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from meshkit.cli.terminal import one_line
from plugins.conformance.checks_capabilities import COLLECTIVES
from plugins.conformance.recorder import Recorder
from plugins.conformance.report import Fault, Result, Status
from plugins.sdk.backend import Backend

WORLD_SIZE = 2
TIMEOUT_S = 120.0
"""For both ranks in all: most of it is the start of two interpreters with their framework."""
_LAST_WORDS = 2000


def check_collectives(backend: Backend, recorder: Recorder, *, name: str, options: Mapping[str, str]) -> None:
    """Run every declared primitive; `name` and `options` load the same back end in the ranks' processes."""
    declared = backend.capabilities().collectives
    for primitive in COLLECTIVES:
        if primitive not in declared:
            recorder.skip_undeclared(f"collectives/{primitive}", "the report does not list it")
    wanted = [each for each in COLLECTIVES if each in declared and recorder.wants(f"collectives/{each}")]
    if not wanted:
        return
    if backend.collectives is None:
        for primitive in wanted:
            _fail(recorder, primitive, Fault.DECLARED_BUT_MISSING, "it is declared; the plugin has none")
        return
    start = time.monotonic()
    ranks = run_ranks(name, options, wanted)
    share_s = (time.monotonic() - start) / len(wanted)
    for primitive in wanted:
        _record(recorder, primitive, ranks, share_s)


RankOutcome = Mapping[str, Any]
"""primitive -> "" where it was right, else what was wrong; or {"error": why the rank ended}."""


def run_ranks(name: str, options: Mapping[str, str], primitives: list[str]) -> list[RankOutcome]:
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
        deadline = time.monotonic() + TIMEOUT_S
        return [_await_rank(*rank, deadline=deadline) for rank in ranks]


def _await_rank(process: subprocess.Popen[bytes], result: Path, log: Path, *, deadline: float) -> RankOutcome:
    try:
        code = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIMEOUT_S:.0f} s"}
    if not result.exists():
        last_words = one_line(log.read_text(errors="replace")[-_LAST_WORDS:])
        return {"error": f"ended with exit code {code}: {last_words}"}
    outcome: RankOutcome = json.loads(result.read_text())
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """A rank that is done has left already; one that hangs is ended."""
    if process.poll() is None:
        process.kill()
    process.wait()


def _record(recorder: Recorder, primitive: str, ranks: list[RankOutcome], duration_s: float) -> None:
    lost = [f"rank {rank}: {outcome['error']}" for rank, outcome in enumerate(ranks) if "error" in outcome]
    if lost:
        _fail(recorder, primitive, Fault.RAISED, "; ".join(lost), duration_s)
        return
    wrong = [f"rank {rank}: {outcome[primitive]}" for rank, outcome in enumerate(ranks) if outcome[primitive]]
    if wrong:
        _fail(recorder, primitive, Fault.WRONG_RESULT, "; ".join(wrong), duration_s)
        return
    detail = f"{WORLD_SIZE} ranks"
    recorder.add(Result(f"collectives/{primitive}", Status.PASS, detail, duration_s=duration_s))


def _fail(recorder: Recorder, primitive: str, fault: Fault, detail: str, duration_s: float = 0.0) -> None:
    recorder.add(Result(f"collectives/{primitive}", Status.FAIL, detail, fault, duration_s))
