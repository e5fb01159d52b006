"""What each service of a running mesh holds in memory: idle, under load, after it, and how fast it grows.

A closed loop runs against a mesh whose KV cache is small, so that the radix tree is full and evicts long
before the end. Growth is the slope of a straight line through the second half of the load, with a 95 % band
that allows for samples that lie alike because they are neighbours. `--objects` tells which lines of Python
hold more at the end of the load than in its middle; growth is then not told, as tracing takes memory itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import uvloop

from benchmarks.plots import save_lines
from benchmarks.report import describe_run, run_command
from benchmarks.running_mesh import running_mesh, service_pids
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc

KIB_IN_MIB = 1024
PREFIXES = 16
"""Prompts begin with one of so many texts, so that the radix tree branches and splits."""
PREFIX_TOKENS = 64
OWN_TOKENS = (16, 96)
OUTPUT_TOKENS = 32
STEADY_FROM = 0.5
"""Of the load: by then every buffer has had its largest content, and the cache evicts."""
CONFIDENCE = 0.95
TOP_LINES = 10
PAUSE_AFTER_FAILURE_S = 0.5
OBJECTS_SIGNAL = signal.SIGUSR2
OBJECTS_LIMIT_S = 60.0

OBJECTS_TRACE = """
import json, os, signal, tracemalloc

def dump(*_):
    ours = [tracemalloc.Filter(False, file) for file in (tracemalloc.__file__, __file__)]
    snapshot = tracemalloc.take_snapshot().filter_traces(ours)
    lines = {str(each.traceback): each.size for each in snapshot.statistics("lineno")}
    file = os.path.join(os.environ["CHIPMESH_OBJECTS_DIR"], f"{os.getpid()}.json")
    with open(file + ".part", "w") as out:
        json.dump(lines, out)
    os.replace(file + ".part", file)

signal.signal(signal.SIGUSR2, dump)
tracemalloc.start()
"""
"""A sitecustomize for every process of the mesh: at the signal it writes the bytes that each line holds."""


@dataclass(frozen=True)
class Footprint:
    """One look at one process, MiB. at_s: seconds since the mesh was up. rss: what it has mapped and touched.
    pss: the same with shared pages divided among those that share them.
    """

    at_s: float
    rss_mib: float
    pss_mib: float


@dataclass(frozen=True)
class Growth:
    """MiB per hour: the slope, and the ends of its band."""

    mib_per_hour: float
    low: float
    high: float


@dataclass
class Watch:
    """Looks at processes, by service name, until it is cancelled."""

    pids: Mapping[str, int]
    interval_s: float
    seen: dict[str, list[Footprint]] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun

    async def run(self) -> None:
        """One look at each process every `interval_s`."""
        while True:
            for name, pid in self.pids.items():
                # Of a process of some GiB the system walks all pages for this.
                rss_mib, pss_mib = await asyncio.to_thread(read_footprint, pid)
                self.seen.setdefault(name, []).append(Footprint(self.now(), rss_mib, pss_mib))
            await asyncio.sleep(self.interval_s)

    def between(self, name: str, first_s: float, last_s: float) -> list[Footprint]:
        """What was seen of a service in that time."""
        return [each for each in self.seen.get(name, []) if first_s <= each.at_s <= last_s]


def read_footprint(pid: int) -> tuple[float, float]:
    """(RSS, PSS) of a process in MiB. Raises ProcessLookupError where it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    return parse_rollup(text)


def parse_rollup(text: str) -> tuple[float, float]:
    """(RSS, PSS) in MiB of the text of a smaps_rollup, which counts in KiB."""
    values = dict(re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE))
    return int(values["Rss"]) / KIB_IN_MIB, int(values["Pss"]) / KIB_IN_MIB


def fit_growth(points: Sequence[tuple[float, float]]) -> Growth | None:
    """The growth of (seconds, MiB) by least squares; None for fewer than four points, or all at one time.

    The band widens by the samples' likeness to their neighbours: n points whose residuals correlate by r at
    one step tell as much as n (1 - r) / (1 + r) independent ones.
    """
    if len(points) < 4:
        return None
    times, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    centred = times - times.mean()
    spread = float(centred @ centred)
    if spread == 0.0:
        return None
    slope = float(centred @ values) / spread
    residuals = values - values.mean() - slope * centred
    squares = float(residuals @ residuals)
    likeness = float(residuals[1:] @ residuals[:-1]) / squares if squares > 0 else 0.0
    likeness = min(max(likeness, 0.0), 0.99)
    freedom = max(len(points) * (1 - likeness) / (1 + likeness) - 2, 1.0)
    # The residuals' variance by their degrees of freedom, the slope's by the points that count.
    error = math.sqrt(squares / freedom / spread)
    half = t_quantile(0.5 + CONFIDENCE / 2, freedom) * error
    return Growth(*(value * 3600 for value in (slope, slope - half, slope + half)))


def t_quantile(probability: float, freedom: float) -> float:
    """Of Student's distribution, by Cornish and Fisher's expansion: within 1 % from 4 degrees of freedom on;
    with fewer it is too small, 12 % at two.
    """
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def describe_stage(seen: Sequence[Footprint]) -> dict[str, float]:
    """Medians and the peak of a stage, MiB."""
    if not seen:
        return {}
    return {
        "rss_mib": round(statistics.median(each.rss_mib for each in seen), 1),
        "pss_mib": round(statistics.median(each.pss_mib for each in seen), 1),
        "peak_rss_mib": round(max(each.rss_mib for each in seen), 1),
    }


def describe_growth(seen: Sequence[Footprint], requests_per_s: float) -> dict[str, Any] | None:
    """Growth of the resident set, its band, and the same by requests; None where too little was seen."""
    growth = fit_growth([(each.at_s, each.rss_mib) for each in seen])
    if growth is None:
        return None
    by_requests = growth.mib_per_hour * KIB_IN_MIB / 3600 / requests_per_s * 1000 if requests_per_s else None
    return {
        "mib_per_hour": round(growth.mib_per_hour, 2),
        "band": [round(growth.low, 2), round(growth.high, 2)],
        "kib_per_1000_requests": None if by_requests is None else round(by_requests, 1),
        "grows": growth.low > 0,
    }


def make_request(draw: random.Random, prefixes: Sequence[Sequence[int]], vocab_size: int) -> Any:
    """A greedy request that begins as some others do."""
    own = [draw.randrange(vocab_size) for _ in range(draw.randint(*OWN_TOKENS))]
    tokens = [*draw.choice(prefixes), *own]
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=tokens)),
        sampling=inference_pb2.SamplingOptions(temperature=0.0),
        stop=inference_pb2.StopOptions(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
    )


@dataclass
class Ends:
    """How requests ended: as they should, or by which code of gRPC."""

    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)


async def run_load(stub: Any, *, concurrency: int, seconds: float, vocab_size: int) -> Ends:
    """A closed loop for that long. One that fails is counted, and its client goes on after a pause: on a
    starved machine the keepalive ends streams, which is no reason to give up an hour's watch.
    """
    draw = random.Random(0)
    prefixes = [[draw.randrange(vocab_size) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    ends_at = time.monotonic() + seconds
    ends = Ends()

    async def client() -> None:
        while time.monotonic() < ends_at:
            try:
                async for _ in stub.Generate(make_request(draw, prefixes, vocab_size)):
                    pass
                ends.good += 1
            except grpc.aio.AioRpcError as error:
                ends.failed[error.code().name] += 1
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    if not ends.good:
        raise SystemExit(f"no request ended well, so there was no load: {dict(ends.failed)}")
    return ends


def evicted_tokens(http_address: str) -> int:
    """Of all replicas since the scheduler's start, by its metrics."""
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r"^chipmesh_evicted_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    return int(sum(float(value) for value in found))


@dataclass(frozen=True)
class Stages:
    """When the load began, when it was steady, when it ended: seconds of the watch. evicted: tokens until it
    was steady, and until its end. lines: bytes by service and line of Python, then and then.
    """

    load_s: float
    steady_s: float
    end_s: float
    ends: Ends
    evicted: tuple[int, int]
    lines: tuple[Mapping[str, Mapping[str, int]], Mapping[str, Mapping[str, int]]]


async def watch_stages(arguments: argparse.Namespace, mesh: Mapping[str, Any], watch: Watch) -> Stages:
    """Idle, load, idle again."""
    async with grpc.aio.insecure_channel(mesh["gateway"]["address"]) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        vocab_size = (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].vocab_size
        await asyncio.sleep(arguments.idle_seconds)
        load_s = watch.now()
        load = asyncio.create_task(
            run_load(
                stub, concurrency=arguments.concurrency, seconds=arguments.seconds, vocab_size=vocab_size
            )
        )
        try:
            await asyncio.wait({load}, timeout=arguments.seconds * STEADY_FROM)
            steady_s, first = watch.now(), await asyncio.to_thread(_look, arguments, mesh)
            ends = await load
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        end_s, last = watch.now(), await asyncio.to_thread(_look, arguments, mesh)
        await asyncio.sleep(arguments.idle_seconds)
    return Stages(load_s, steady_s, end_s, ends, (first[0], last[0]), (first[1], last[1]))


def _look(arguments: argparse.Namespace, mesh: Mapping[str, Any]) -> tuple[int, dict[str, dict[str, int]]]:
    evicted = evicted_tokens(mesh["scheduler"]["http_address"])
    return evicted, take_lines(service_pids(mesh), arguments.objects_dir) if arguments.objects else {}


def take_lines(pids: Mapping[str, int], folder: Path) -> dict[str, dict[str, int]]:
    """Bytes by line of Python of each process, which it writes when it is told.

    Raises:
        TimeoutError: one has not answered.
    """
    taken: dict[str, dict[str, int]] = {}
    for name, pid in pids.items():
        file = folder / f"{pid}.json"
        file.unlink(missing_ok=True)
        os.kill(pid, OBJECTS_SIGNAL)
        deadline = time.monotonic() + OBJECTS_LIMIT_S
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} (pid {pid}) has told of no objects in {OBJECTS_LIMIT_S:.0f} s")
            time.sleep(0.05)
        taken[name] = json.loads(file.read_text(encoding="utf-8"))
    return taken


def most_grown(first: Mapping[str, int], last: Mapping[str, int]) -> dict[str, float]:
    """The lines that hold most more than before, KiB."""
    grown = {line: size - first.get(line, 0) for line, size in last.items()}
    most = sorted(grown.items(), key=lambda item: -item[1])[:TOP_LINES]
    return {line: round(size / 1024, 1) for line, size in most if size > 0}


async def observe(arguments: argparse.Namespace, mesh: Mapping[str, Any]) -> dict[str, Any]:
    """All stages of a mesh that is up, as a report. Raises what makes the watch or the load fail."""
    watch = Watch(service_pids(mesh), arguments.interval or max(1.0, arguments.seconds / 600))
    stages = asyncio.create_task(watch_stages(arguments, mesh, watch))
    watching = asyncio.create_task(watch.run())
    try:
        done, _ = await asyncio.wait({stages, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching in done:
            watching.result()
        return describe_watch(watch, await stages)
    finally:
        for task in (stages, watching):
            task.cancel()
        await asyncio.gather(stages, watching, return_exceptions=True)


def describe_watch(watch: Watch, stages: Stages) -> dict[str, Any]:
    """Each service by stage, and its line for a plot: minutes and MiB."""
    requests_per_s = stages.ends.good / (stages.end_s - stages.load_s)
    services = {}
    for name, pid in watch.pids.items():
        steady = watch.between(name, stages.steady_s, stages.end_s)
        services[name] = {
            "pid": pid,
            "idle": describe_stage(watch.between(name, 0.0, stages.load_s)),
            "load": describe_stage(steady),
            "after": describe_stage(watch.between(name, stages.end_s, math.inf)),
            # Snapshots of objects take memory of their own, far more than what grows.
            "growth": None if stages.lines[0] else describe_growth(steady, requests_per_s),
            "rss_mib": [(round(each.at_s / 60, 3), round(each.rss_mib, 1)) for each in watch.seen[name]],
        }
    first, last = stages.lines
    return {
        "load_s": round(stages.end_s - stages.load_s, 1),
        "measured_s": round(stages.end_s - stages.steady_s, 1),
        "requests": stages.ends.good,
        "failed": dict(stages.ends.failed),
        "requests_per_s": round(requests_per_s, 2),
        "evicted_tokens": {"until_steady": stages.evicted[0], "until_end": stages.evicted[1]},
        "steady": stages.evicted[0] > 0,
        "services": services,
        "grown_kib": {name: most_grown(first.get(name, {}), lines) for name, lines in last.items()},
    }


def trace_objects(folder: Path) -> dict[str, str]:
    """Environment in which each process of a mesh writes its allocations into `folder` when told to."""
    (folder / "sitecustomize.py").write_text(OBJECTS_TRACE, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"CHIPMESH_OBJECTS_DIR": str(folder), "PYTHONPATH": path}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """A mesh of its own, watched."""
    with tempfile.TemporaryDirectory() as name:
        arguments.objects_dir = Path(name)
        traced = trace_objects(Path(name)) if arguments.objects else {}
        flags = ["--model-path", arguments.model, "--backend", arguments.backend]
        flags += ["--load-format", arguments.load_format, "--max-total-tokens", str(arguments.cache_tokens)]
        with running_mesh(*flags, environment=traced) as mesh:
            report = uvloop.run(observe(arguments, mesh))
    return {
        **describe_run(),
        "model": arguments.model,
        "backend": arguments.backend,
        "concurrency": arguments.concurrency,
        "cache_tokens": arguments.cache_tokens,
        **report,
    }


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    evicted = report["evicted_tokens"]
    print(
        f"{report['requests']} requests in {report['load_s']} s, failed {report['failed']}, evicted {evicted}"
    )
    print(f"{'MiB (RSS, PSS)':<20} {'idle':>16} {'load':>16} {'after':>16}   growth, MiB per hour")
    for name, each in report["services"].items():
        cells = [
            f"{each[stage].get('rss_mib', math.nan):7.1f} {each[stage].get('pss_mib', math.nan):7.1f}"
            for stage in ("idle", "load", "after")
        ]
        growth = each["growth"]
        band = "not told" if growth is None else f"{growth['mib_per_hour']} {growth['band']}"
        print(f"{name:<20} {cells[0]:>16} {cells[1]:>16} {cells[2]:>16}   {band}")
    if not report["steady"]:
        print("nothing was evicted before the measured half: not a steady state, give it more --seconds")
    for name, lines in report["grown_kib"].items():
        print(f"{name}: {json.dumps(lines, indent=2)}")


def plot(file: Path, report: dict[str, Any]) -> None:
    """Resident sets over time."""
    series = {name: each["rss_mib"] for name, each in report["services"].items()}
    save_lines(file, "Resident memory of each service", series, "minutes since the mesh was up", "MiB")


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model, or a path")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--load-format", default="auto", help="as of `chipmesh up`")
    parser.add_argument("--cache-tokens", type=int, default=8192, help="of the KV cache: small, so it evicts")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load; its second half is measured")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="before the load, and after it")
    parser.add_argument(
        "--interval", type=float, help="seconds between looks; default 1, or 600 looks in all"
    )
    parser.add_argument("--objects", action="store_true", help="growth by line of Python, by tracemalloc")
    run_command(parser, run, print_table, words, plot=plot)


if __name__ == "__main__":
    main()
