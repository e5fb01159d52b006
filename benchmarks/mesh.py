"""Throughput, TTFT and TPOT of a whole mesh, closed loop over gRPC: its own, or the one at `--address`.

Prompts are random token ids: nothing is shared, so the prefix cache has no part in them. What `chipmesh bench
serve` measures on any server, other workloads too, this measures on a fresh mesh, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.plots import save_bars
from benchmarks.report import describe_run, run_command
from benchmarks.running_mesh import running_mesh
from meshkit.load import GrpcTarget, describe_samples, random_tokens, run_closed_loop


@dataclass(frozen=True)
class Load:
    """A closed loop of random prompts: `concurrency` requests run at once until `requests` have ended."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int


def make_load(arguments: argparse.Namespace, concurrency: int, *, number: int) -> Load:
    """Of round `number`, the warm-up's being -1. No two share a prompt: it would be in the prefix cache."""
    requests = max(5 * concurrency, 10) if number >= 0 else concurrency
    seed = 1_000_000 * (number + 1) + concurrency
    return Load(concurrency, requests, arguments.prompt_tokens, arguments.output_tokens, seed)


async def run_load(address: str, load: Load) -> dict[str, Any]:
    """The figures of one run through the gateway at `address`.

    Raises:
        SystemExit: a request failed or answered short: the times would say nothing.
    """
    async with GrpcTarget(address) as target:
        model = await target.choose_model()
        assert model.vocab_size is not None
        requests = random_tokens(
            load.requests,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            vocab_size=model.vocab_size,
            seed=load.seed,
        )
        samples = await run_closed_loop(target, requests, concurrency=load.concurrency)
    figures = describe_samples(samples)
    if figures["failed"] or figures["shorter_than_asked"]:
        raise SystemExit(f"requests failed or answered short, so the times say nothing: {figures['errors']}")
    return figures


@contextlib.contextmanager
def _gateway(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.address:
        yield arguments.address
        return
    with running_mesh("--model-path", arguments.model, "--dtype", arguments.dtype, *arguments.flag) as mesh:
        yield mesh["gateway"]["address"]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All loads once for warmth, then each `rounds` times, in turns, so that drift meets all alike."""
    rounds: dict[str, list[dict[str, Any]]] = {str(each): [] for each in arguments.concurrency}
    with _gateway(arguments) as address:
        for number in range(-1, arguments.rounds):
            for concurrency in arguments.concurrency:
                load = make_load(arguments, concurrency, number=number)
                figures = uvloop.run(run_load(address, load))
                if number >= 0:
                    rounds[str(concurrency)].append({**dataclasses.asdict(load), **figures})
    return {
        **describe_run(),
        "model": arguments.model,
        "flags": arguments.flag,
        "output_tokens_per_s": {
            concurrency: statistics.median(each["output_tokens_per_s"] for each in results)
            for concurrency, results in rounds.items()
        },
        "rounds": rounds,
    }


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    for concurrency, rounds in report["rounds"].items():
        tokens_per_s = report["output_tokens_per_s"][concurrency]
        ttft = statistics.median(each["ttft_ms"]["p50"] for each in rounds)
        tpot = statistics.median(each["tpot_ms"]["p50"] for each in rounds)
        print(
            f"concurrency {concurrency:>3}: {tokens_per_s:8.1f} output tokens/s, TTFT p50 {ttft:.0f} ms, "
            f"TPOT p50 {tpot:.1f} ms"
        )


def plot(path: Path, report: Mapping[str, Any]) -> None:
    """Bars of output tokens/s by concurrency."""
    groups = {f"{key} at once": {"mesh": value} for key, value in report["output_tokens_per_s"].items()}
    save_bars(path, report["model"], groups, "output tokens/s")


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="a gateway's gRPC address; default: a mesh of its own")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--flag", action="append", default=[], help="a word more for `chipmesh up`; may be repeated"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    run_command(parser, run, print_table, words, plot=plot)


if __name__ == "__main__":
    main()
