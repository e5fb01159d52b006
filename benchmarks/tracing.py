"""What traces cost at full load: processor time of gateway, scheduler and executor, by share of requests.

Two meshes of the hash model, whose steps cost nothing, so that nothing hides it: one without an exporter, one
that sends its spans to a collector in this process. Shares are the client's choice (the sampled flag of its
traceparent). Rounds go in turns, their order changes from one to the next; figures are medians over them.

Beside them `calls` (benchmarks.tracing_calls): the same calls in one process, which the load of a machine
hardly moves, and `share_of_request`: what they are of a request's processor time without traces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.mesh import Load
from benchmarks.overhead import read_replica
from benchmarks.report import describe_run, run_command
from benchmarks.running_mesh import running_mesh
from benchmarks.tracing_calls import OUTPUT_TOKENS, measure_calls
from meshkit.load import GrpcTarget, describe_samples, random_tokens, run_closed_loop

GOAL = 0.01
"""At the share that an operator sets for full load (1 %)."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
EXPORT_S = 1.2
"""Spans leave every second; their sending belongs to the round that made them."""
WITHOUT = "no exporter"
SHARES = {"0 %": 0.0, "1 %": 0.01, "100 %": 1.0}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans and counts them."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the contract's name
        """See TraceService."""
        self.spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def running_collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


@dataclass(frozen=True)
class MeasuredMesh:
    """A mesh and the processes whose time is read, by name."""

    address: str
    pids: Mapping[str, int]

    def processor_s(self) -> dict[str, float]:
        """User and system time so far, of all threads."""
        return {name: _processor_s(pid) for name, pid in self.pids.items()}


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextlib.contextmanager
def measured_mesh(model: str, *flags: str) -> Iterator[MeasuredMesh]:
    """A mesh of one hash worker."""
    words = ("--backend", "hash", "--model-path", model, "--load-format", "dummy", *flags)
    with running_mesh(*words) as mesh:
        executor = uvloop.run(read_replica(mesh["scheduler"]["address"])).executor_pid
        pids = {name: mesh[name]["pid"] for name in ("gateway", "scheduler")}
        yield MeasuredMesh(mesh["gateway"]["address"], {**pids, "executor": executor})


def tracer_of(share: float) -> Callable[[], str]:
    """Makes traceparents of which this share is sampled: every so many, not by chance."""
    made = 0.0

    def trace() -> str:
        nonlocal made
        made += share
        sampled = made >= 1 - 1e-9
        made -= sampled
        return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if sampled else '00'}"

    return trace


async def run_load(mesh: MeasuredMesh, load: Load, trace: Callable[[], str]) -> float:
    """Tokens/s.

    Raises:
        SystemExit: a request failed.
    """
    async with GrpcTarget(mesh.address, trace=trace) as target:
        model = await target.choose_model()
        assert model.vocab_size is not None
        requests = random_tokens(
            load.requests, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens,
            vocab_size=model.vocab_size, seed=load.seed,
        )  # fmt: skip
        samples = await run_closed_loop(target, requests, concurrency=load.concurrency)
    figures = describe_samples(samples)
    if figures["failed"]:
        raise SystemExit(f"requests failed: {figures['errors']}")
    return float(figures["output_tokens_per_s"])


def measure(mesh: MeasuredMesh, load: Load, trace: Callable[[], str]) -> dict[str, float]:
    """Microseconds of processor time per output token by process, and tokens/s."""
    before = mesh.processor_s()
    tokens_per_s = uvloop.run(run_load(mesh, load, trace))
    time.sleep(EXPORT_S)
    after = mesh.processor_s()
    tokens = load.requests * load.output_tokens
    used = {name: (after[name] - before[name]) / tokens * 1e6 for name in before}
    return {**used, "all": sum(used.values()), "tokens_per_s": tokens_per_s}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All shares in turns, as often as asked, after one round for warmth."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in (WITHOUT, *SHARES)}
    with (
        running_collector() as (collector, endpoint),
        measured_mesh(arguments.model, "--no-page-traces") as plain,
        measured_mesh(arguments.model, "--otlp-endpoint", endpoint) as traced,
    ):
        sides = {WITHOUT: (plain, lambda: ""), **{k: (traced, tracer_of(v)) for k, v in SHARES.items()}}
        for number in range(-1, arguments.rounds):
            turn = number % len(sides)
            for name, (mesh, trace) in [*list(sides.items())[turn:], *list(sides.items())[:turn]]:
                load = Load(arguments.streams, arguments.requests, 16, OUTPUT_TOKENS, number + 2)
                figures = measure(mesh, load, trace)
                if number >= 0:
                    rounds[name].append(figures)
        spans = collector.spans
    us_per_token = {name: _medians(each) for name, each in rounds.items()}
    return {
        **describe_run(),
        **asyncio.run(_calls(us_per_token[WITHOUT]["all"] * OUTPUT_TOKENS)),
        "goal": GOAL,
        "streams": arguments.streams,
        "output_tokens": OUTPUT_TOKENS,
        "spans": spans,
        "us_per_token": us_per_token,
        "extra": {name: _extra(rounds[name], rounds[WITHOUT]) for name in SHARES},
        "rounds": rounds,
    }


async def _calls(request_us: float) -> dict[str, Any]:
    """Microseconds per request of the calls, and by share what they are of a request's `request_us`."""
    costs = {name: measure_calls(traced=name == "traced") for name in ("traced", "untraced")}
    us = {name: {key: round(part.us, 1) for key, part in each.items()} for name, each in costs.items()}
    traced, untraced = (sum(us[name].values()) for name in ("traced", "untraced"))
    shares = {
        name: round((share * traced + (1 - share) * untraced) / request_us, 5)
        for name, share in SHARES.items()
    }
    return {"calls_us": us, "share_of_request": shares}


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}


def _extra(rounds: Sequence[Mapping[str, float]], without: Sequence[Mapping[str, float]]) -> float:
    ratios = [one["all"] / other["all"] - 1 for one, other in zip(rounds, without, strict=True)]
    return round(statistics.median(ratios), 4)


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    for name, parts in report["calls_us"].items():
        print(f"{name:>12}: {sum(parts.values()):.0f} us of calls a request ({_listed(parts)})")
    print("of a request: " + ", ".join(f"{k} traced {v:.2%}" for k, v in report["share_of_request"].items()))
    for name, figures in report["us_per_token"].items():
        parts = _listed({part: figures[part] for part in ("gateway", "scheduler", "executor")})
        extra = f"  ({report['extra'][name]:+.1%})" if name in report["extra"] else ""
        print(f"{name:>12}: {figures['all']:.2f} us of processor a token ({parts}){extra}")


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in parts.items())


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="its vocabulary is used, not its weights")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=4)
    run_command(parser, run, print_table, words)


if __name__ == "__main__":
    main()
