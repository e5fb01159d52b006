"""What the mesh costs beside the executor alone (P4), and what it carries where steps cost nothing (P5).

`mesh_over_inproc`: output tokens/s of a whole mesh (client, gateway, scheduler, executor; gRPC between all)
over those of the same executor driven in one process by the same batcher, on the same requests, in turns.
`hash_tokens_per_s`: through a mesh whose model costs nothing, at many streams. `step_gap_us`: how long the
device waits between two steps of 5 ms; the median, from the scheduler's histogram.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.inproc import describe_load
from benchmarks.mesh import Load, make_load, run_load
from benchmarks.plots import save_bars
from benchmarks.report import describe_run, run_command
from benchmarks.running_mesh import running_mesh, service_pids, thread_times
from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.rpc.channel import open_channel
from worker_svc.executor_set import SPIN_COUNT

GOALS = {"mesh_over_inproc": 0.97, "hash_tokens_per_s": 30_000, "step_gap_us": 50.0}
HASH_STREAMS = 256
GAP_STEP_MS = 5


# ---------------------------------------------------------------- the mesh beside one process


class InProcess:
    """benchmarks.inproc as a child, with the environment of an executor. Use it as a context manager."""

    def __init__(self, model: str, replica: admin_pb2.ReplicaStatus) -> None:
        numbers = (
            replica.pages.total, replica.page_size_tokens, replica.max_running_requests, replica.chunk_tokens,
        )  # fmt: skip
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.inproc", model, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GOMP_SPINCOUNT": str(SPIN_COUNT)},
        )

    def __enter__(self) -> InProcess:
        """Returns once the model is loaded."""
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def run(self, load: Load) -> float:
        """Output tokens/s."""
        assert self._child.stdin is not None
        self._child.stdin.write(describe_load(load))
        self._child.stdin.flush()
        figures = json.loads(self._read())
        return float(figures["tokens"] / figures["seconds"])

    def _read(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit("the executor in one process has ended; its error is above")
        return line


async def read_replica(scheduler: str) -> admin_pb2.ReplicaStatus:
    """The one replica of a mesh, as its scheduler has it."""
    async with open_channel(scheduler, traced=False) as channel:
        mesh = (await admin_pb2_grpc.AdminServiceStub(channel).GetMesh(admin_pb2.GetMeshRequest())).mesh
    return mesh.groups[0].replicas[0]


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Mesh and one process in turns; all rounds, and the median of the ratios by concurrency."""
    rounds: dict[str, list[dict[str, Any]]] = {str(each): [] for each in arguments.concurrency}
    with running_mesh("--model-path", arguments.model, "--dtype", "float32") as mesh:
        replica = asyncio.run(read_replica(mesh["scheduler"]["address"]))
        with InProcess(arguments.model, replica) as inproc:
            for number in range(-1, arguments.rounds):
                for concurrency in arguments.concurrency:
                    load = make_load(arguments, concurrency, number=number)
                    alone = inproc.run(load)
                    whole = uvloop.run(run_load(mesh["gateway"]["address"], load))
                    if number >= 0:
                        rounds[str(concurrency)].append(_one_round(alone, whole))
    return {
        "mesh_over_inproc": {key: _median(each, "ratio") for key, each in rounds.items()},
        "mesh_tokens_per_s": {key: _median(each, "mesh") for key, each in rounds.items()},
        "inproc_tokens_per_s": {key: _median(each, "inproc") for key, each in rounds.items()},
        "rounds": rounds,
    }


def _one_round(alone: float, whole: Mapping[str, Any]) -> dict[str, Any]:
    figures = {
        key: whole[key] for key in ("ttft_ms", "tpot_ms", "tokens_per_message", "client_cpu_us_per_token")
    }
    tokens_per_s = whole["output_tokens_per_s"]
    ratio = round(tokens_per_s / alone, 4)
    return {"inproc": round(alone, 1), "mesh": tokens_per_s, "ratio": ratio, **figures}


def _median(rounds: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(each[key] for each in rounds))


# ---------------------------------------------------------------- a model that costs nothing


def carry_free_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s through a mesh of the hash model, how many a message carried, and what each service used."""
    rounds = []
    with running_mesh("--backend", "hash", "--model-path", arguments.model, "--load-format", "dummy") as mesh:
        processes = service_pids(mesh)
        for seed in range(arguments.rounds):
            load = Load(HASH_STREAMS, 4 * HASH_STREAMS, 16, 256, seed)
            before = _seconds_of(processes)
            figures = uvloop.run(run_load(mesh["gateway"]["address"], load))
            tokens = load.requests * load.output_tokens
            spent = {name: after - before[name] for name, after in _seconds_of(processes).items()}
            figures["cpu_us_per_token"] = {
                name: round(seconds / tokens * 1e6, 2) for name, seconds in spent.items()
            }
            rounds.append(figures)
    keys = (
        "output_tokens_per_s", "tokens_per_message", "ttft_ms", "client_cpu_us_per_token", "cpu_us_per_token",
    )  # fmt: skip
    return {
        "hash_tokens_per_s": _median(rounds, "output_tokens_per_s"),
        "hash_tokens_per_message": _median(rounds, "tokens_per_message"),
        "streams": HASH_STREAMS,
        "cpu_us_per_token": {
            name: statistics.median(each["cpu_us_per_token"][name] for each in rounds) for name in processes
        },
        "rounds": [{key: each[key] for key in keys} for each in rounds],
    }


def _seconds_of(processes: Mapping[str, int]) -> dict[str, float]:
    return {name: sum(thread_times(process).values()) for name, process in processes.items()}


def measure_gap(arguments: argparse.Namespace) -> dict[str, Any]:
    """Median microseconds between steps of GAP_STEP_MS at each number of streams."""
    gaps: dict[str, float] = {}
    step = f"step_ms={GAP_STEP_MS}"
    flags = (
        "--backend",
        "hash",
        "--model-path",
        arguments.model,
        "--load-format",
        "dummy",
        "--backend-option",
        step,
    )
    with running_mesh(*flags) as mesh:
        metrics = f"http://{mesh['scheduler']['http_address']}/metrics"
        for streams in arguments.gap_streams:
            before = read_gaps(metrics)
            load = Load(streams, streams, 16, 512, streams)
            uvloop.run(run_load(mesh["gateway"]["address"], load))
            gaps[str(streams)] = round(median_of_buckets(before, read_gaps(metrics)) * 1e6, 1)
    return {"step_gap_us": gaps, "step_ms": GAP_STEP_MS}


def read_gaps(url: str) -> dict[float, float]:
    """Cumulative counts of the scheduler's histogram of idle time, by upper bound in seconds."""
    with urllib.request.urlopen(url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    buckets = [
        sample
        for family in families
        for sample in family.samples
        if sample.name == "chipmesh_device_idle_seconds_bucket"
    ]
    return {float(sample.labels["le"]): sample.value for sample in buckets}


def median_of_buckets(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Median of what came between two readings, linear within its bucket.

    Raises:
        ValueError: nothing came.
    """
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = max(counts.values(), default=0.0)
    if not total:
        raise ValueError("no step came between the two readings")
    lower = below = 0.0
    for bound, count in counts.items():
        if count >= total / 2:
            return lower + (bound - lower) * (total / 2 - below) / (count - below)
        lower, below = bound, count
    raise ValueError("the histogram has no last bucket")


# ---------------------------------------------------------------- the report


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All three, one after the other."""
    parts = {"compare": compare, "hash": carry_free_steps, "gap": measure_gap}
    report: dict[str, Any] = {**describe_run(), "goals": GOALS, "model": arguments.model}
    for name in arguments.parts:
        part = parts[name](arguments)
        report |= {f"{name}_rounds" if key == "rounds" else key: value for key, value in part.items()}
    return report


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    for concurrency, ratio in report.get("mesh_over_inproc", {}).items():
        mesh, alone = (report[f"{side}_tokens_per_s"][concurrency] for side in ("mesh", "inproc"))
        print(f"concurrency {concurrency:>3}: mesh {mesh:.1f}, one process {alone:.1f} tokens/s: {ratio:.3f}")
    if "hash_tokens_per_s" in report:
        print(
            f"free steps: {report['hash_tokens_per_s']:,.0f} tokens/s at {report['streams']} streams, "
            f"{report['hash_tokens_per_message']:.1f} tokens a message; processor time of a token: "
            + ", ".join(f"{name} {us:.1f} us" for name, us in report["cpu_us_per_token"].items())
        )
    for streams, gap in report.get("step_gap_us", {}).items():
        print(f"gap between steps of {report['step_ms']} ms at {streams} streams: {gap} us")


def plot(path: Path, report: Mapping[str, Any]) -> None:
    """Bars of mesh and one process by concurrency."""
    groups = {
        f"{concurrency} at once": {
            "one process": report["inproc_tokens_per_s"][concurrency],
            "mesh": report["mesh_tokens_per_s"][concurrency],
        }
        for concurrency in report["mesh_over_inproc"]
    }
    save_bars(path, "What the mesh costs", groups, "output tokens/s")


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--parts", nargs="+", choices=("compare", "hash", "gap"), default=["compare", "hash", "gap"]
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--gap-streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    run_command(parser, run, print_table, words, plot=plot)


if __name__ == "__main__":
    main()
