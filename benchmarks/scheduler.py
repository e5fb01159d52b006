"""One whole step of the scheduler's core at a steady load: results applied, plan made, deltas coded.

At every step a twentieth of the running requests end and as many take their place: each makes 20 tokens, and
they began one after the other. Prompts share a prefix of 1,024 tokens and have 32 of their own. The result of
a step is made beforehand (its decoding counts, its making does not), the plan is coded to bytes, and one step
is in flight, as with overlap. Times are of one core, in milliseconds.

vLLM's v1 scheduler takes turns with ours on the same load, round by round (vllm_scheduler.py); a speedup is
the median over the rounds of theirs / ours. It lives in an environment of its own (--install-vllm), never
beside ours, and runs there as a process of its own. Where it is missing, the report says why.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.report import describe_run, percentile, run_command
from benchmarks.vllm import VLLM_FOLDER, Vllm, install_vllm, start_vllm
from chipmesh.device.v1alpha1 import execution_pb2, sampling_pb2
from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.policy import POLICIES, make_policy
from scheduler_svc.core.structures import Finished, ReplicaId, ReplicaLimits, Request, RequestId, StepPlan
from scheduler_svc.core.token_key import token_key
from scheduler_svc.step_codec import decode_result, encode_plans

SHARED_TOKENS = 1024
OWN_TOKENS = 32
OUTPUT_TOKENS = 20
VOCABULARY = 150_000


@dataclass
class Payload:
    """What step_codec reads of a request."""

    sampling: sampling_pb2.SamplingParameters = field(
        default_factory=lambda: sampling_pb2.SamplingParameters(temperature=0.7, top_p=0.9, seed=7)
    )
    traceparent: str = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


class Executor:
    """Answers plans as an executor does, with the same token for all; keeps no more than who decodes."""

    def __init__(self) -> None:
        self._decoding: set[int] = set()

    def execute(self, plan: StepPlan) -> bytes:
        """The coded result of a plan."""
        self._decoding.difference_update(plan.released_slots)
        sampled = sorted(self._decoding) if plan.decode else []
        for chunk in plan.prefill:
            if chunk.last:
                sampled.append(chunk.slot)
                self._decoding.add(chunk.slot)
        result = execution_pb2.StepResult(
            epoch=1, step_seq=plan.step_seq, slots=sampled, token_ids=[11] * len(sampled)
        )
        return result.SerializeToString()


def make_limits(*, running: int, page_size: int, cached: int = 0) -> ReplicaLimits:
    """Room for `running` requests and their successors, and for `cached` tokens beside them."""
    per_request = SHARED_TOKENS + OWN_TOKENS + OUTPUT_TOKENS + 2 * page_size
    return ReplicaLimits(
        page_count=(cached + (running + 256) * per_request) // page_size,
        page_size=page_size,
        max_running_requests=running,
        chunk_tokens=max(8192, 2 * OWN_TOKENS * running),
        context_tokens=1 << 20,
    )


class SteadyLoad:
    """A batcher with `running` requests, `waiting` more in its queue, and `cached` tokens beside."""

    def __init__(
        self, *, running: int, page_size: int, policy: str, waiting: int = 0, cached: int = 0
    ) -> None:
        self.running = running
        self.waiting = waiting
        self.batcher = Batcher(
            limits=make_limits(running=running, page_size=page_size, cached=cached),
            policy=make_policy(policy),
            replica=ReplicaId("benchmark/1"),
            conservativeness=0.1,
        )
        self.executor = Executor()
        self.results: list[bytes] = []
        self._numbers = itertools.count(1)
        self._draw = np.random.default_rng(0)
        self._prefix = self._draw.integers(0, VOCABULARY, SHARED_TOKENS).tolist()
        self._payload = Payload()
        self._fill_cache(cached, page_size)

    def _fill_cache(self, tokens: int, page_size: int) -> None:
        """Sequences of 4,096 tokens, as if requests had left them."""
        pool, length = self.batcher._pool, 4096
        for _ in range(tokens // length):
            pages = pool.ledger.allocate(length // page_size)
            assert pages is not None
            sequence = self._draw.integers(0, VOCABULARY, length).tolist()
            known, _ = pool.tree.insert(token_key(sequence), pages)
            pool.ledger.free(pages[:known])  # With pages of one token, two sequences may begin alike.

    def add(self, *, output_tokens: int = OUTPUT_TOKENS) -> None:
        """One more request, made before the clock runs."""
        prompt = self._prefix + self._draw.integers(0, VOCABULARY, OWN_TOKENS).tolist()
        request = Request(RequestId(next(self._numbers)), "m", prompt, output_tokens, payload=self._payload)
        self.batcher.add(request)

    def warm_up(self) -> None:
        """Fill all slots with requests of different age, and settle."""
        for number in range(self.running + self.waiting):
            self.add(output_tokens=1 + number % OUTPUT_TOKENS)
        for _ in range(3 * OUTPUT_TOKENS):
            self.step()

    def step(self) -> float:
        """One step; its seconds, without those that the executor and the clients take."""
        seconds = ended = 0.0
        if len(self.results) > 1:
            message = self.results.pop(0)
            started = time.perf_counter()
            events = self.batcher.apply(decode_result(execution_pb2.StepResult.FromString(message)))
            seconds += time.perf_counter() - started
            ended = sum(isinstance(event, Finished) for event in events)
        for _ in range(int(ended)):
            self.add()
        started = time.perf_counter()
        plan = self.batcher.plan()
        if plan is not None:
            encode_plans([plan], epoch=1).SerializeToString()
        self.batcher.take_events()
        seconds += time.perf_counter() - started
        if plan is not None:
            self.results.append(self.executor.execute(plan))
        return seconds


def describe_load(running: int, *, page_size: int, steps: int) -> dict[str, int]:
    """The same load for vllm_scheduler.py."""
    limits = make_limits(running=running, page_size=page_size)
    return {
        "running": running,
        "steps": steps,
        "page_size": page_size,
        "page_count": limits.page_count,
        "chunk_tokens": limits.chunk_tokens,
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }


def measure(load: SteadyLoad, *, steps: int) -> dict[str, float]:
    """Milliseconds of a step: median and 99th percentile, and how many requests ran."""
    load.warm_up()
    gc.collect()
    gc.disable()
    try:
        samples = [load.step() * 1e3 for _ in range(steps)]
    finally:
        gc.enable()
    load.batcher.check_identity()
    return {
        "p50": round(statistics.median(samples), 4),
        "p99": round(percentile(samples, 0.99), 4),
        "running": load.batcher.running,
    }


# ---------------------------------------------------------------- all loads


RUNNING = (1, 64, 1024, 4096)
Figures = dict[str, float]
Turn = dict[str, Callable[[], Figures]]
"""Measured one after the other, by name: a load of ours, and theirs (`vllm/running`) where there is one."""
Rounds = dict[str, list[Figures]]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All loads, each `rounds` times; the figures of the round whose median is the middle one."""
    if arguments.install_vllm:
        install_vllm(arguments.vllm)
    with start_vllm(arguments.vllm) as vllm:
        if isinstance(vllm, str):
            print(f"vLLM is skipped: {vllm}", file=sys.stderr)
        turns = make_turns(arguments, None if isinstance(vllm, str) else vllm)
        rounds = measure_turns(turns, arguments.rounds)
    middles = {name: middle(results) for name, results in rounds.items()}
    return {
        **describe_run(),
        **group(middles, arguments.page_size),
        **compare(vllm, rounds, arguments),
        "rounds": rounds,
    }


def make_turns(arguments: argparse.Namespace, vllm: Vllm | None) -> list[Turn]:
    """All turns of a round; vLLM has part in those of the first page size."""
    turns: dict[str, Turn] = {
        name: {name: partial(_measure_new, make_load, steps=arguments.steps)}
        for name, make_load in make_loads(arguments.page_size).items()
    }
    page_size = arguments.page_size[0]
    if vllm is not None:
        for running in RUNNING:
            turns[f"{page_size}/{running}"][f"vllm/{running}"] = partial(
                vllm.measure, describe_load(running, page_size=page_size, steps=arguments.vllm_steps)
            )
    return list(turns.values())


def _measure_new(make_load: Callable[[], SteadyLoad], *, steps: int) -> Figures:
    return measure(make_load(), steps=steps)


def measure_turns(turns: Sequence[Turn], rounds: int) -> Rounds:
    """Figures of every round by name; who begins changes from round to round."""
    results: Rounds = {name: [] for turn in turns for name in turn}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("scheduler steps", total=len(results) * rounds)
        for number in range(rounds):
            for turn in turns:
                for name in turn if number % 2 == 0 else reversed(turn):
                    results[name].append(turn[name]())
                    progress.advance(task)
    return results


def middle(results: Sequence[Figures]) -> Figures:
    """The round whose median is the middle one."""
    return sorted(results, key=lambda each: each["p50"])[len(results) // 2]


def compare(vllm: Vllm | str, rounds: Rounds, arguments: argparse.Namespace) -> dict[str, Any]:
    """`vllm_plan_ms` and `speedup_vs_vllm` by running count; both empty where `vllm` is the reason why."""
    if isinstance(vllm, str):
        return {"vllm": {"problem": vllm}, "vllm_plan_ms": {}, "speedup_vs_vllm": {}}
    theirs = {str(running): rounds[f"vllm/{running}"] for running in RUNNING}
    ours = {running: rounds[f"{arguments.page_size[0]}/{running}"] for running in theirs}
    return {
        "vllm": {"problem": None, "versions": vllm.versions, "steps": arguments.vllm_steps},
        "vllm_plan_ms": {running: middle(results)["p50"] for running, results in theirs.items()},
        "speedup_vs_vllm": {running: speedup(ours[running], theirs[running]) for running in theirs},
    }


def speedup(ours: Sequence[Figures], theirs: Sequence[Figures]) -> float:
    """Median over the rounds of theirs / ours: a slow minute of the machine meets both of its round."""
    ratios = (their["p50"] / our["p50"] for our, their in zip(ours, theirs, strict=True))
    return round(statistics.median(ratios), 2)


def make_loads(page_sizes: Sequence[int]) -> dict[str, Callable[[], SteadyLoad]]:
    """By name: `page/running`, `page/10M cached`, `page/policy` with 4,096 waiting."""
    loads: dict[str, Callable[[], SteadyLoad]] = {}
    for page_size in page_sizes:
        for running in RUNNING:
            loads[f"{page_size}/{running}"] = partial(
                SteadyLoad, running=running, page_size=page_size, policy="fcfs"
            )
        loads[f"{page_size}/10M cached"] = partial(
            SteadyLoad, running=1024, page_size=page_size, policy="fcfs", cached=10_000_000
        )
    for policy in POLICIES:
        loads[f"{page_sizes[0]}/{policy}"] = partial(
            SteadyLoad, running=64, page_size=page_sizes[0], policy=policy, waiting=4096
        )
    return loads


def group(middles: dict[str, dict[str, float]], page_sizes: Sequence[int]) -> dict[str, Any]:
    """`plan_ms` by running count for the first page size, and everything by page size."""

    def of(page_size: int, names: Sequence[object]) -> dict[str, dict[str, float]]:
        return {str(name): middles[f"{page_size}/{name}"] for name in names}

    first = page_sizes[0]
    return {
        "page_size": first,
        "plan_ms": {name: figures["p50"] for name, figures in of(first, RUNNING).items()},
        "by_page_size": {str(size): of(size, [*RUNNING, "10M cached"]) for size in page_sizes},
        "with_4096_waiting": of(first, list(POLICIES)),
    }


def print_table(report: dict[str, Any]) -> None:
    """The same for people."""
    table = Table(title="One step of the scheduler, ms: result applied, plan made and coded; 5 % replaced")
    for column in ("page", "load", "median", "p99"):
        table.add_column(column, justify="right")
    for page_size, loads in report["by_page_size"].items():
        for name, figures in loads.items():
            label = f"{name} running" if name.isdigit() else f"1024 running, {name}"
            table.add_row(page_size, label, str(figures["p50"]), str(figures["p99"]))
    for policy, figures in report["with_4096_waiting"].items():
        table.add_row(
            str(report["page_size"]),
            f"64 running, 4096 wait, {policy}",
            str(figures["p50"]),
            str(figures["p99"]),
        )
    console = Console()
    console.print(table)
    if report["vllm"]["problem"]:
        console.print(f"vLLM is skipped: {report['vllm']['problem']}")
        return
    beside = Table(title=f"Beside vLLM {report['vllm']['versions']['vllm']}, median ms of a step")
    for column in ("running", "ours", "vLLM", "speedup"):
        beside.add_column(column, justify="right")
    for running, theirs in report["vllm_plan_ms"].items():
        times = f"{report['speedup_vs_vllm'][running]} x"
        beside.add_row(running, str(report["plan_ms"][running]), str(theirs), times)
    console.print(beside)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page-size", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--rounds", type=int, default=3, help="times that each load is set up and measured")
    parser.add_argument("--steps", type=int, default=300, help="steps of a round")
    parser.add_argument("--vllm", type=Path, default=VLLM_FOLDER, help="environment that vLLM is in")
    parser.add_argument("--install-vllm", action="store_true", help="make it first, with venv and pip")
    parser.add_argument("--vllm-steps", type=int, default=100, help="steps of a round of vLLM's")
    run_command(parser, run, print_table)


if __name__ == "__main__":
    main()
