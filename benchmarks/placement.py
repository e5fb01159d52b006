"""Where threads run on few cores: the same mesh under load, its processes bound to cores in several ways, in
turns. Bound from outside (sched_setaffinity), so nothing of the mesh differs but that.

What counts is the device's time for a step: messages lengthen it, and a placement that helps shortens it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.mesh import make_load, run_load
from benchmarks.report import describe_run, run_command
from benchmarks.running_mesh import running_mesh, service_pids, thread_times

DEVICE_TIME = "chipmesh_step_device_time_seconds"


@dataclass(frozen=True)
class Placement:
    """What is bound; the rest may run anywhere.

    services_on_last: gateway, scheduler, supervisor and client to the last core. shell_on_last: so are those
    threads of the executor that do not compute. kernel_pinned: each computing thread to a core of its own.
    """

    services_on_last: bool = False
    shell_on_last: bool = False
    kernel_pinned: bool = False


PLACEMENTS = {
    "free": Placement(),
    "services": Placement(services_on_last=True),
    "services+shell": Placement(services_on_last=True, shell_on_last=True),
    "kernel": Placement(kernel_pinned=True),
    "all": Placement(services_on_last=True, shell_on_last=True, kernel_pinned=True),
}


class Mesh:
    """The processes of a running mesh, and this client. kernel: the executor's threads that compute."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        processes = service_pids(described)
        self.gateway = described["gateway"]["address"]
        self.metrics = f"http://{described['scheduler']['http_address']}/metrics"
        self.executor = processes.pop(f"{described['workers'][0]['name']}-executor")
        self.services = [*processes.values(), os.getpid()]
        self.kernel: list[int] = []

    def find_kernel(self, before: Mapping[int, float]) -> None:
        """Those that computed most since `before`: as many as there are cores."""
        spent = {thread: now - before.get(thread, 0.0) for thread, now in thread_times(self.executor).items()}
        self.kernel = sorted(sorted(spent, key=lambda thread: -spent[thread])[: os.cpu_count() or 1])

    def place(self, placement: Placement) -> None:
        """Bind all threads anew."""
        cores = list(range(os.cpu_count() or 1))
        last = cores[-1:]
        for process in self.services:
            _bind(thread_times(process), last if placement.services_on_last else cores)
        shell = [thread for thread in thread_times(self.executor) if thread not in self.kernel]
        _bind(shell, last if placement.shell_on_last else cores)
        for core, thread in zip(cores, self.kernel, strict=True):
            _bind([thread], [core] if placement.kernel_pinned else cores)

    def device_time(self) -> tuple[float, float]:
        """Seconds and number of all steps so far."""
        with urllib.request.urlopen(self.metrics) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        seconds = sum(sample.value for sample in samples if sample.name == f"{DEVICE_TIME}_sum")
        count = sum(sample.value for sample in samples if sample.name == f"{DEVICE_TIME}_count")
        return seconds, count


def _bind(threads: Iterable[int], cores: Iterable[int]) -> None:
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            continue  # A thread of a pool that has ended meanwhile.


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every placement at each concurrency, `rounds` times in turns, on one mesh."""
    flags = ("--model-path", arguments.model, "--dtype", "float32", *arguments.flag)
    rounds: list[dict[str, Any]] = []
    with running_mesh(*flags) as described:
        mesh = Mesh(described)
        before = thread_times(mesh.executor)
        for concurrency in arguments.concurrency:
            uvloop.run(run_load(mesh.gateway, make_load(arguments, concurrency, number=-1)))
        mesh.find_kernel(before)
        for number in range(arguments.rounds):
            for concurrency in arguments.concurrency:
                for turn, placement in enumerate(arguments.placements):
                    mesh.place(PLACEMENTS[placement])
                    load_number = number * len(arguments.placements) + turn
                    rounds.append(
                        _one_round(mesh, arguments, concurrency, number=load_number, placement=placement)
                    )
    return {**describe_run(), "model": arguments.model, "summary": _summarise(rounds), "rounds": rounds}


def _one_round(
    mesh: Mesh, arguments: argparse.Namespace, concurrency: int, *, number: int, placement: str
) -> dict[str, Any]:
    seconds, steps = mesh.device_time()
    figures = uvloop.run(run_load(mesh.gateway, make_load(arguments, concurrency, number=number)))
    seconds_after, steps_after = mesh.device_time()
    return {
        "placement": placement,
        "concurrency": concurrency,
        "step_ms": round(1000 * (seconds_after - seconds) / (steps_after - steps), 3),
        "tokens_per_s": round(figures["output_tokens_per_s"], 1),
        "ttft_p50_ms": figures["ttft_ms"]["p50"],
    }


def _summarise(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = dict.fromkeys((each["concurrency"], each["placement"]) for each in rounds)
    summary = []
    for concurrency, placement in keys:
        mine = [
            each for each in rounds if (each["concurrency"], each["placement"]) == (concurrency, placement)
        ]
        medians = {
            key: statistics.median(each[key] for each in mine)
            for key in ("step_ms", "tokens_per_s", "ttft_p50_ms")
        }
        summary.append({"concurrency": concurrency, "placement": placement, **medians})
    return summary


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    for row in report["summary"]:
        print(
            f"concurrency {row['concurrency']:>3}, {row['placement']:<17}: step {row['step_ms']:7.3f} ms, "
            f"{row['tokens_per_s']:7.1f} tokens/s, TTFT p50 {row['ttft_p50_ms']:.0f} ms"
        )


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--flag", action="append", default=[], help="a word more for `chipmesh up`")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    run_command(parser, run, print_table, words)


if __name__ == "__main__":
    main()
