"""`chipmesh up` to the first token of a client that waits already, phase by phase, and what loading a plugin
costs beside the import of its runtime (goal P8).

The phases follow the path that the first token waits for and add up to it: they are the times between marks
that the processes leave anyway, their starts in /proc and lines of the worker's log. `--profile` tells where
the imports of each process go.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from benchmarks.plots import save_bars
from benchmarks.report import describe_run, run_command
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.cli.processes import start_ticks
from meshkit.modelstore import default_cache_dir, open_model
from meshkit.ports import reserve_port
from meshkit.rpc.channel import open_channel

GOAL_FIRST_TOKEN_S = 5.0
GOAL_PLUGIN_LOAD_MS = 300.0
START_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0
RETRY_S = 0.02
MOST_PACKAGES = 12
_TICKS = os.sysconf("SC_CLK_TCK")
_UP = (sys.executable, "-m", "meshkit.cli", "up", "--json")

PLUGINS: dict[str, tuple[dict[str, str], str]] = {
    "cpu": ({}, "torch"),
    "hash": ({}, ""),
    "kunlun": ({"emulate": "true"}, "torch"),
}
"""Options, and the module whose import is its runtime's; "": it has none."""

_LOAD_PLUGIN = """
import importlib, json, sys, time
name, options, runtime = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
import worker_svc.executor.app
from worker_svc.plugin_loader import load_plugin
begun = time.perf_counter()
if runtime:
    importlib.import_module(runtime)
imported = time.perf_counter()
load_plugin(name, options)
loaded = time.perf_counter()
seconds = {"runtime_import_ms": imported - begun, "plugin_load_ms": loaded - imported}
print(json.dumps({name: value * 1e3 for name, value in seconds.items()}))
"""
"""As in an executor: what that imports is there, then comes the plugin's own."""

_LOAD_MODEL = """
import sys
import worker_svc.executor.app
from plugins.sdk.runner import LoadOptions
from worker_svc.plugin_loader import load_plugin
load_plugin("cpu", {}).runner.load(LoadOptions(sys.argv[1]), lambda stage, share: None)
"""

PROCESSES = {
    "up": "import meshkit.cli.app, meshkit.cli.up",
    "scheduler": "import meshkit.cli.app, scheduler_svc.app",
    "gateway": "import meshkit.cli.app, gateway.app",
    "worker": "import meshkit.cli.app, worker_svc.app",
    "executor": _LOAD_MODEL,
}
"""What each process imports until it serves; the executor until it has its model."""

PHASES = {
    "command": "worker process",
    "worker": "executor process",
    "executor_and_plugin": "plugin loaded",
    "executor_listens": "executor listens",
    "model": "model loaded",
    "check": "model checked",
    "kv_cache": "kv cache",
    "registration": "registered",
    "first_request": "first token",
}
"""Each with the mark that ends it, in order. `command`: `up` itself, to the start of the worker. `worker`:
its imports and configuration. `executor_and_plugin`: the executor's imports, the runtime's and the plugin's.
"""


@dataclass(frozen=True)
class Start:
    """One start. first_token_s: from the spawn of `up`. marks: seconds since the epoch. cpu_s: of each
    process until just after the first token, its own alone.
    """

    first_token_s: float
    phases_s: Mapping[str, float]
    cpu_s: Mapping[str, float]


def split_phases(begun: float, marks: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase; their sum is the last mark's distance from `begun`. A phase without a mark has
    none of its own: its time goes to the next. Starts of processes are known to 10 ms, so a phase of no
    length may be that much below zero.
    """
    phases, last = {}, begun
    for name, mark in PHASES.items():
        if mark in marks:
            phases[name] = marks[mark] - last
            last = marks[mark]
    return phases


def read_marks(lines: Iterable[str]) -> dict[str, float]:
    """The marks in a worker's log, which holds its executor's lines too: the first of each kind."""
    marks: dict[str, float] = {}
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # Libraries write plain lines between ours.
            event = json.loads(line)
            if isinstance(event, dict) and (mark := _mark_of(event)) is not None:
                marks.setdefault(mark, datetime.fromisoformat(_iso(event["timestamp"])).timestamp())
    return marks


def _mark_of(event: Mapping[str, Any]) -> str | None:
    name = str(event.get("event", ""))
    if name.startswith("Backend ") and name.endswith(" loaded successfully"):
        return "plugin loaded"
    if name == "load_progress" and event.get("stage") == "first forward":
        return "model checked" if event.get("fraction") == 1.0 else "model loaded"
    return {
        "executor started": "executor listens",
        "kv_cache": "kv cache",
        "registered": "registered",
    }.get(name)


def _iso(timestamp: str) -> str:
    return timestamp.replace("Z", "+00:00")  # Python 3.10 reads no Z.


def process_start(pid: int) -> float:
    """When a process started, in seconds since the epoch, to 10 ms. Raises ProcessLookupError."""
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far, of its threads but not of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def wait_for_token(address: str) -> float:
    """When the first token came, in seconds since the epoch. The client is there before the gateway is, and
    asks again for as long as no worker serves the model.
    """
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=[1, 2, 3, 4, 5, 6, 7, 8])),
        sampling=inference_pb2.SamplingOptions(temperature=0.0),
        stop=inference_pb2.StopOptions(max_tokens=1, ignore_eos=True),
    )
    async with open_channel(address, traced=False) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        while True:
            try:
                async for response in stub.Generate(request, wait_for_ready=True):
                    if response.event.WhichOneof("kind") == "output":
                        return time.time()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND):
                    raise
            await asyncio.sleep(RETRY_S)


async def start_once(words: Sequence[str], environment: Mapping[str, str]) -> Start:
    """`chipmesh up WORDS` in the foreground, to its first token and its end.

    Raises:
        SystemExit: it did not come up; its last words are in the text.
    """
    with tempfile.TemporaryDirectory() as folder, reserve_port() as port:
        token = asyncio.create_task(wait_for_token(f"127.0.0.1:{port}"))
        await asyncio.sleep(0)  # It dials before there is anything.
        begun = time.time()
        up = await asyncio.create_subprocess_exec(
            *_UP,
            *("--port", str(port), *words),
            env={**environment, "CHIPMESH_STATE_DIR": folder},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            mesh = await _read_mesh(up)
            at = await asyncio.wait_for(token, START_LIMIT_S)
            return await asyncio.to_thread(_describe_start, begun, at, mesh)
        finally:
            token.cancel()
            await asyncio.gather(token, return_exceptions=True)
            await _stop(up)


async def _read_mesh(up: asyncio.subprocess.Process) -> dict[str, Any]:
    """What `up --json` prints once the mesh is up."""
    assert up.stdout is not None
    assert up.stderr is not None
    line = await asyncio.wait_for(up.stdout.readline(), START_LIMIT_S)
    mesh: dict[str, Any] = json.loads(line or b"{}")
    if "gateway" not in mesh:  # Nothing, or an error.
        raise SystemExit(f"the mesh did not come up: {(await up.stderr.read()).decode()}")
    return mesh


async def _stop(up: asyncio.subprocess.Process) -> None:
    """End the launcher, which ends the mesh."""
    if up.returncode is None:
        up.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(up.communicate(), STOP_LIMIT_S)
    except asyncio.TimeoutError:
        up.kill()
        await up.wait()


def _describe_start(begun: float, at: float, mesh: Mapping[str, Any]) -> Start:
    worker = mesh["workers"][0]
    pids = {"up": mesh["launcher"]["pid"], "scheduler": mesh["scheduler"]["pid"]}
    pids |= {"gateway": mesh["gateway"]["pid"], "worker": worker["pid"], "executor": worker["executor_pid"]}
    marks = {
        "worker process": process_start(worker["pid"]),
        "executor process": process_start(worker["executor_pid"]),
        **read_marks(Path(worker["log"]).read_text(encoding="utf-8").splitlines()),
        "first token": at,
    }
    cpu_s = {name: processor_seconds(pid) for name, pid in pids.items()}
    return Start(at - begun, split_phases(begun, marks), cpu_s)


def start_cold(arguments: argparse.Namespace) -> Start:
    """A start with nothing cached but the model's file itself: its header is converted and the kernel built.
    Python's byte code and the system's cache of files stay.
    """
    source = open_model(arguments.model, cache_dir=default_cache_dir()).source
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "CHIPMESH_CACHE_DIR"}
        words = up_words(arguments, model=str(source))
        return uvloop.run(start_once(words, {**environment, "XDG_CACHE_HOME": cache}))


def up_words(arguments: argparse.Namespace, *, model: str) -> list[str]:
    """What follows `chipmesh up`."""
    return ["--model-path", model, "--dtype", arguments.dtype]


def measure_plugin(name: str, rounds: int) -> dict[str, Any]:
    """Medians over fresh processes of the runtime's import and of all the plugin does beside it; why not
    where it cannot be loaded here.
    """
    options, runtime = PLUGINS[name]
    command = [sys.executable, "-c", _LOAD_PLUGIN, name, json.dumps(options), runtime]
    runs = []
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"skipped": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
    return {**medians, "runtime": runtime or None, "runs": runs}


def profile_process(code: str, *words: str) -> dict[str, Any]:
    """Milliseconds that a fresh interpreter spends in imports while it runs `code`, by top package."""
    command = [sys.executable, "-X", "importtime", "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"skipped": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    sums = sum_imports(done.stderr.splitlines())
    most = sorted(sums.items(), key=lambda item: -item[1])[:MOST_PACKAGES]
    return {
        "total_ms": round(sum(sums.values()), 1),
        "packages_ms": {name: round(value, 1) for name, value in most},
    }


def sum_imports(lines: Iterable[str]) -> dict[str, float]:
    """Milliseconds by top package of the modules' own times in the output of `-X importtime`. torch's parts
    count each by itself: some of them should not be there at all.
    """
    sums: dict[str, float] = defaultdict(float)
    for line in lines:
        own, _, rest = line.removeprefix("import time:").partition("|")
        if line.startswith("import time:") and own.strip().isdigit():
            parts = rest.rpartition("|")[2].strip().split(".")
            sums[".".join(parts[: 2 if parts[0] == "torch" else 1])] += int(own) / 1e3
    return sums


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts first, then each plugin in processes of its own."""
    words = up_words(arguments, model=arguments.model)
    starts = [uvloop.run(start_once(words, os.environ)) for _ in range(arguments.rounds)]
    cold = start_cold(arguments) if arguments.cold else None
    plugins = {name: measure_plugin(name, arguments.rounds) for name in arguments.plugins}
    profile = {}
    if arguments.profile:
        profile = {name: profile_process(code, arguments.model) for name, code in PROCESSES.items()}
    return {
        **describe_run(),
        "model": arguments.model,
        "dtype": arguments.dtype,
        **summarise_starts(starts),
        "cold_first_token_s": None if cold is None else round(cold.first_token_s, 3),
        "cold_phases_s": None if cold is None else _rounded(cold.phases_s),
        "plugin_load_ms": plugins,
        "goals": judge(starts, plugins),
        "imports": profile,
    }


def summarise_starts(starts: Sequence[Start]) -> dict[str, Any]:
    """The median start, whose phases add up to it, and all."""
    middle = sorted(starts, key=lambda start: start.first_token_s)[len(starts) // 2]
    return {
        "first_token_s": round(middle.first_token_s, 3),
        "phases_s": _rounded(middle.phases_s),
        "cpu_s": _rounded(middle.cpu_s),
        "runs": [
            {"first_token_s": round(start.first_token_s, 3), "phases_s": _rounded(start.phases_s)}
            for start in starts
        ],
    }


def judge(starts: Sequence[Start], plugins: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """P8, part by part: what it asks for and whether it holds."""
    loads = {name: each["plugin_load_ms"] for name, each in plugins.items() if "plugin_load_ms" in each}
    first = summarise_starts(starts)["first_token_s"]
    return {
        "first_token_s": {"at_most": GOAL_FIRST_TOKEN_S, "holds": first <= GOAL_FIRST_TOKEN_S},
        "plugin_load_ms": {
            "at_most": GOAL_PLUGIN_LOAD_MS,
            "holds": {name: value <= GOAL_PLUGIN_LOAD_MS for name, value in loads.items()},
        },
    }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    print(f"chipmesh up to the first token: {report['first_token_s']} s (goal: {GOAL_FIRST_TOKEN_S})")
    for name, seconds in report["phases_s"].items():
        print(f"  {name:<20} {seconds:7.3f} s")
    print(f"processor seconds: {report['cpu_s']}")
    if report["cold_first_token_s"] is not None:
        print(f"the very first start: {report['cold_first_token_s']} s: {report['cold_phases_s']}")
    for name, each in report["plugin_load_ms"].items():
        print(f"plugin {name:<7}: { ({key: each[key] for key in each if key != 'runs'}) }")
    for name, each in report["imports"].items():
        print(f"imports of {name}: {each}")


def plot(file: Path, report: dict[str, Any]) -> None:
    """Phases of the warm start, and of the cold one beside it."""
    groups = {
        phase: {"cached": seconds, **_cold_bar(report, phase)}
        for phase, seconds in report["phases_s"].items()
    }
    save_bars(file, "chipmesh up to the first token", groups, "seconds")


def _cold_bar(report: Mapping[str, Any], phase: str) -> dict[str, float]:
    cold = report["cold_phases_s"] or {}
    return {"very first start": cold[phase]} if phase in cold else {}


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model, or a path")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="starts, and loads of each plugin")
    parser.add_argument("--plugins", nargs="*", choices=tuple(PLUGINS), default=list(PLUGINS))
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="no start without any cache")
    parser.add_argument("--profile", action="store_true", help="imports of each process by package")
    run_command(parser, run, print_table, words, plot=plot)


if __name__ == "__main__":
    main()
