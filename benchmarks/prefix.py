"""What sharing prefixes is worth (goal P6): a mesh with and without its radix cache, and llama.cpp's server.

Every run has a server that was just started, so its cache is cold, and prompts that no run before had; rounds
take the servers in turn. `speedup` is the median over rounds of the time without the cache over the time with
it, on 64 requests that share 1,024 tokens; conversations and trees of thought stand beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.peer_servers import LLAMA_VERSION, LlamaServer, PeerMissing, prepare_model
from benchmarks.plots import save_bars
from benchmarks.report import describe_run, run_command
from benchmarks.running_mesh import running_mesh
from meshkit.load import (
    GrpcTarget,
    LoadRequest,
    OpenAiTarget,
    Sample,
    Target,
    describe_samples,
    multi_turn,
    random_tokens,
    run_closed_loop,
    shared_prefix,
    tree_of_thought,
)

GOAL_SPEEDUP = 6.4
GOAL_OVER_LLAMA = 5.0
WITH, WITHOUT, LLAMA = "with_cache", "without_cache", "llama.cpp"
SEEDS_PER_ROUND = 1000
# A slot goes on from what its last prompt has in common with the next one; that is its prefix cache.
LLAMA_BODY = {"ignore_eos": True, "cache_prompt": True}
SHOWN = (
    "elapsed_s", "output_tokens_per_s", "prompt_tokens", "cached_tokens", "output_tokens",
    "tokens_per_message", "client_cpu_us_per_token",
)  # fmt: skip

Make = Callable[[int, int], list[LoadRequest]]


@dataclass(frozen=True)
class Workload:
    """make(vocab_size, seed): the requests."""

    make: Make
    concurrency: int


@dataclass(frozen=True)
class Run:
    """One workload on one server, once."""

    figures: dict[str, Any]
    answers: tuple[tuple[int, ...] | None, ...]


def _shared(requests: int, prefix_tokens: int) -> Make:
    return lambda vocab_size, seed: shared_prefix(
        1, requests=requests, prefix_tokens=prefix_tokens, own_tokens=32, output_tokens=16,
        vocab_size=vocab_size, seed=seed,
    )  # fmt: skip


WORKLOADS: Mapping[str, Workload] = {
    "shared_prefix": Workload(_shared(64, 1024), concurrency=16),
    "shared_prefix_512": Workload(_shared(32, 512), concurrency=8),
    "multi_turn": Workload(
        lambda vocab_size, seed: multi_turn(
            8, turns=4, turn_tokens=128, output_tokens=16, vocab_size=vocab_size, seed=seed
        ),
        concurrency=8,
    ),
    "tree_of_thought": Workload(
        lambda vocab_size, seed: tree_of_thought(
            1, branches=3, depth=3, root_tokens=256, thought_tokens=32, output_tokens=16,
            vocab_size=vocab_size, seed=seed,
        ),
        concurrency=8,
    ),
}  # fmt: skip
HEADLINE, AGAINST_LLAMA = "shared_prefix", "shared_prefix_512"


async def run_workload(target: Target, workload: Workload, *, vocab_size: int, seed: int) -> Run:
    """One closed loop after a warm-up of prompts that share nothing with it.

    Raises:
        SystemExit: a request failed, or answered short: then there is nothing to compare.
    """
    warmup = random_tokens(2, prompt_tokens=48, output_tokens=4, vocab_size=vocab_size, seed=seed + 1)
    samples = await run_closed_loop(
        target, workload.make(vocab_size, seed), concurrency=workload.concurrency, warmup=warmup
    )
    run = summarise_run(samples)
    _tell(f"{len(samples)} requests in {run.figures['elapsed_s']:.1f} s")
    return run


def summarise_run(samples: Sequence[Sample]) -> Run:
    """Figures and answers. Raises SystemExit where a request failed or answered short."""
    report = describe_samples(samples)
    if report["failed"] or report["shorter_than_asked"]:
        raise SystemExit(
            f"{report['failed']} requests failed ({report['errors']}) and {report['shorter_than_asked']} "
            "answered short, so the times say nothing"
        )
    figures = {name: report[name] for name in SHOWN} | {"ttft_p50_ms": report["ttft_ms"]["p50"]}
    return Run(figures, tuple(tuple(each.token_ids) if each.token_ids else None for each in samples))


async def measure_mesh(address: str, names: Sequence[str], *, round_number: int) -> dict[str, Run]:
    """All workloads one after another on one mesh; their prompts have nothing in common."""
    async with GrpcTarget(address) as target:
        vocab_size = (await target.choose_model()).vocab_size
        if vocab_size is None:
            raise SystemExit(f"the gateway at {address} does not tell the size of its vocabulary")
        return {
            name: await run_workload(
                target, WORKLOADS[name], vocab_size=vocab_size, seed=_seed(round_number, name)
            )
            for name in names
        }


async def measure_llama(base_url: str, *, round_number: int) -> Run:
    """The smaller shared prefix on llama.cpp's server, with its own prompt cache on."""
    async with OpenAiTarget(base_url, extra_body=LLAMA_BODY) as target:
        vocab_size = (await target.choose_model()).vocab_size
        if vocab_size is None:
            raise SystemExit(f"{base_url} does not tell the size of its vocabulary")
        seed = _seed(round_number, AGAINST_LLAMA)
        return await run_workload(target, WORKLOADS[AGAINST_LLAMA], vocab_size=vocab_size, seed=seed)


def _seed(round_number: int, name: str) -> int:
    """The same for all servers of a round, so that they get the same prompts."""
    return SEEDS_PER_ROUND * (1 + round_number) + 10 * list(WORKLOADS).index(name)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and the ratios. The smaller shared prefix is there for llama.cpp alone."""
    names = [name for name in WORKLOADS if name in arguments.workloads]
    beside = [name for name in names if name != AGAINST_LLAMA]
    runs: dict[str, list[dict[str, Run]]] = {WITH: [], WITHOUT: [], LLAMA: []}
    skipped = "" if AGAINST_LLAMA in names else f"workload {AGAINST_LLAMA} was not asked for"
    for round_number in range(arguments.rounds):
        for kind, flags, wanted in ((WITH, (), names), (WITHOUT, ("--disable-radix-cache",), beside)):
            if not wanted:
                continue
            _tell(f"round {round_number + 1} of {arguments.rounds}: mesh {kind}")
            with running_mesh("--model-path", arguments.model, "--dtype", arguments.dtype, *flags) as mesh:
                address = mesh["gateway"]["address"]
                runs[kind].append(uvloop.run(measure_mesh(address, wanted, round_number=round_number)))
        if not skipped:
            _tell(f"round {round_number + 1} of {arguments.rounds}: {LLAMA}")
            try:
                with LlamaServer(prepare_model(arguments.model)) as llama:
                    done = asyncio.run(measure_llama(llama.base_url, round_number=round_number))
                runs[LLAMA].append({AGAINST_LLAMA: done})
            except PeerMissing as error:
                skipped = str(error)
    workloads = {name: compare(name, runs, over=WITHOUT) for name in beside}
    peer = {"skipped": skipped} if skipped else compare(AGAINST_LLAMA, runs, over=LLAMA)
    return {
        **describe_run(),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "speedup": workloads[HEADLINE]["speedup"] if HEADLINE in workloads else None,
        "goals": {"speedup": GOAL_SPEEDUP, "over_llama_cpp": GOAL_OVER_LLAMA},
        "workloads": workloads,
        "against_llama_cpp": {"version": LLAMA_VERSION, **peer},
    }


def compare(name: str, runs: Mapping[str, Sequence[Mapping[str, Run]]], *, over: str) -> dict[str, Any]:
    """One workload: the time of `over` divided by ours, in each round and their median; and all runs.

    same_answers: share of requests with the same token ids on both; None where one side tells no ids.
    """
    ours = [done[name] for done in runs[WITH]]
    theirs = [done[name] for done in runs[over]]
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [other.figures["elapsed_s"] / one.figures["elapsed_s"] for one, other in pairs]
    equal = [
        one == other
        for mine, other_run in pairs
        for one, other in zip(mine.answers, other_run.answers, strict=True)
        if one is not None and other is not None
    ]
    return {
        "concurrency": WORKLOADS[name].concurrency,
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
        "same_answers": round(sum(equal) / len(equal), 4) if equal else None,
        WITH: [run.figures for run in ours],
        over: [run.figures for run in theirs],
    }


def print_table(report: dict[str, Any]) -> None:
    """One line a workload."""
    print(f"{'':<22}{'with cache':>12}{'without':>12}{'speedup':>10}{'cached':>9}   (seconds, medians)")
    for name, told in report["workloads"].items():
        ours, other = (_median(told[kind], "elapsed_s") for kind in (WITH, WITHOUT))
        cached = _median(told[WITH], "cached_tokens") / _median(told[WITH], "prompt_tokens")
        print(f"{name:<22}{ours:>12.2f}{other:>12.2f}{told['speedup']:>10.2f}{cached:>9.0%}")
    peer = report["against_llama_cpp"]
    if "skipped" in peer:
        print(f"llama.cpp: skipped: {peer['skipped']}")
    else:
        ours, theirs = (_median(peer[kind], "elapsed_s") for kind in (WITH, LLAMA))
        print(f"{'against llama.cpp':<22}{ours:>12.2f}{theirs:>12.2f}{peer['speedup']:>10.2f}")


def _median(runs: Sequence[Mapping[str, Any]], figure: str) -> float:
    return statistics.median(float(run[figure]) for run in runs)


def _draw(file: Path, report: dict[str, Any]) -> None:
    groups = {
        name: {kind.replace("_", " "): _median(told[kind], "elapsed_s") for kind in (WITH, WITHOUT)}
        for name, told in report["workloads"].items()
    }
    if "skipped" not in report["against_llama_cpp"]:
        peer = report["against_llama_cpp"]
        groups[AGAINST_LLAMA] = {
            kind.replace("_", " "): _median(peer[kind], "elapsed_s") for kind in (WITH, LLAMA)
        }
    save_bars(file, f"Shared prefixes, {report['model']}", groups, "s")


def _tell(text: str) -> None:
    print(f"prefix: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", help="of the mesh, as `chipmesh up` has it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    run_command(parser, measure, print_table, plot=_draw)


if __name__ == "__main__":
    main()
