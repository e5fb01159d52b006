"""The prefix tree beside SGLang's Python RadixCache, on the same sequences, in one run.

1,000 sequences of 4,096 tokens share a prefix of 1,024; pages of 1 and 16 tokens. Every operation is timed
one by one, ours and theirs in turn, in several rounds; a figure is the median of a round, a speedup the
median over the rounds of theirs / ours. Keys are made before, as both keep them with the request; `key` says
what they cost.

SGLang's wheel is installed without its dependencies into a folder of its own (--install-sglang), never beside
ours. Its RadixCache is used as it is; of its imports those that the three operations never reach (kernels,
pools, metrics, runtime context) are stand-ins, which the report lists.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.abc
import importlib.machinery
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.report import describe_run, refuse_busy_machine
from scheduler_svc.core.radix_tree import RadixTree
from scheduler_svc.core.token_key import token_key

SGLANG_VERSION = "0.5.23"
SGLANG_FOLDER = Path.home() / ".cache" / "chipmesh-bench" / f"sglang-{SGLANG_VERSION}"
STAND_INS = (
    "sglang.kernels.ops.kvcache.mla_buffer",
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.runtime_context",
    "sglang.srt.utils.common",
)
"""Modules of SGLang that RadixCache imports, but that match, insert and evict never reach."""
SGLANG_PACKAGES = (
    "sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.kvcache", "sglang.srt",
    "sglang.srt.disaggregation", "sglang.srt.mem_cache", "sglang.srt.observability", "sglang.srt.utils",
)  # fmt: skip
"""Its packages above those: they are empty here, since their own code imports the whole engine."""

VOCABULARY = 150_000
EVICTED_TOKENS = 16
Tokens = list[int]


class Tree(ABC):
    """One of the two trees. Keys and pages are in the form that it wants."""

    name: str

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    @abstractmethod
    def key(self, tokens: Tokens) -> Any:
        """What a request keeps of its tokens."""

    @abstractmethod
    def pages(self, first: int, tokens: int) -> Any:
        """Ids of the pages that hold so many tokens, from `first` on."""

    @abstractmethod
    def match(self, key: Any) -> int:
        """Tokens cached."""

    @abstractmethod
    def admit(self, key: Any) -> Any:
        """Look up, pin, read the page ids, unpin."""

    @abstractmethod
    def insert(self, key: Any, pages: Any) -> None:
        """Add a sequence."""

    @abstractmethod
    def evict(self, tokens: int) -> int:
        """Take out so many tokens at least; how many."""


class OurTree(Tree):
    """scheduler_svc.core.radix_tree."""

    name = "ours"

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.tree: RadixTree[int] = RadixTree(page_size=page_size)

    def key(self, tokens: Tokens) -> Any:
        return token_key(tokens)

    def pages(self, first: int, tokens: int) -> Any:
        return array("i", range(first, first + tokens // self.page_size))

    def match(self, key: Any) -> int:
        return self.tree.match(key).depth * self.page_size

    def admit(self, key: Any) -> Any:
        node = self.tree.lock(self.tree.match(key))
        assert node is not None
        pages = self.tree.pages_to(node)
        self.tree.unlock(node)
        return pages

    def insert(self, key: Any, pages: Any) -> None:
        self.tree.insert(key, pages)

    def evict(self, tokens: int) -> int:
        return len(self.tree.evict(tokens // self.page_size)) * self.page_size


class _Pool:
    """What SGLang's tree gives evicted slots back to; ours returns them instead."""

    device = "cpu"

    def free_segment(self, value: Any, start_pos: int) -> None:
        """Takes note of nothing, as the ledger is no part of the measurement on either side."""


class SglangTree(Tree):
    """sglang.srt.mem_cache.radix_cache.RadixCache, least recently used first, without events and metrics."""

    name = "sglang"

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.module = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        self.base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self.cache = self.module.RadixCache.create_simulated(page_size=page_size, mock_allocator=_Pool())
        self.evict_small = self.base.EvictParams(num_tokens=EVICTED_TOKENS)

    def key(self, tokens: Tokens) -> Any:
        return self.module.RadixKey(array("q", tokens))

    def pages(self, first: int, tokens: int) -> Any:
        return torch.arange(first, first + tokens, dtype=torch.int64)  # It keeps one id for each token.

    def match(self, key: Any) -> int:
        return int(self.cache.match_prefix(self.base.MatchPrefixParams(key=key)).device_prefix_len)

    def admit(self, key: Any) -> Any:
        node = self.cache.match_prefix(self.base.MatchPrefixParams(key=key)).last_device_node
        self.cache.inc_lock_ref(node)
        pages = self.cache.path_device_indices(node)
        self.cache.dec_lock_ref(node)
        return pages

    def insert(self, key: Any, pages: Any) -> None:
        self.cache.insert(self.base.InsertParams(key=key, value=pages))

    def evict(self, tokens: int) -> int:
        params = self.base.EvictParams(num_tokens=tokens)
        return int(self.cache.evict(params).num_tokens_evicted)


# ---------------------------------------------------------------- SGLang without its dependencies


class _Absent:
    """Stands for any name of a module that is not there; good for annotations and base classes only."""


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are replaced: first of all, so that the real ones are never looked for."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in STAND_INS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type[_Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent


def import_sglang(folder: Path) -> str | None:
    """Make RadixCache importable from `folder`; None, or why it cannot be."""
    if not (folder / "sglang").is_dir():
        return f"no sglang in {folder}: run with --install-sglang"
    sys.meta_path.insert(0, _StandIns())
    for name in SGLANG_PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    try:
        importlib.import_module("sglang.srt.mem_cache.radix_cache")
    except ImportError as error:
        return f"RadixCache of {folder} cannot be imported: {error}"
    return None


def install_sglang(folder: Path) -> None:
    """Its wheel alone, without dependencies, into a folder of its own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, f"sglang=={SGLANG_VERSION}"], check=True)


# ---------------------------------------------------------------- measuring


def make_sequences(count: int, *, shared: int, own: int, seed: int) -> list[Tokens]:
    """Random token sequences with one beginning."""
    draw = np.random.default_rng(seed)
    prefix = draw.integers(0, VOCABULARY, shared).tolist()
    return [prefix + draw.integers(0, VOCABULARY, own).tolist() for _ in range(count)]


def time_each(operation: Callable[[Any], object], arguments: Iterable[Any]) -> float:
    """Median microseconds of one call."""
    samples = []
    gc.collect()
    gc.disable()
    try:
        for argument in arguments:
            started = time.perf_counter_ns()
            operation(argument)
            samples.append(time.perf_counter_ns() - started)
    finally:
        gc.enable()
    return statistics.median(samples) / 1e3


class Case:
    """One tree full of sequences, and what is asked of it."""

    def __init__(self, tree: Tree, sequences: list[Tokens], extra: list[Tokens]) -> None:
        self.tree = tree
        self.keys = [tree.key(tokens) for tokens in sequences]
        self.tokens = sequences
        for index, key in enumerate(self.keys):
            tree.insert(key, tree.pages(index << 13, len(sequences[index])))
        self.extra = [
            (tree.key(tokens), tree.pages((len(sequences) + index) << 13, len(tokens)))
            for index, tokens in enumerate(extra)
        ]

    def measure(self, draw: random.Random, *, samples: int) -> dict[str, float]:
        """Microseconds of each operation."""
        tree, keys = self.tree, draw.choices(self.keys, k=samples)
        assert tree.match(keys[0]) == len(self.tokens[0]) // tree.page_size * tree.page_size
        figures = {
            "key": time_each(tree.key, draw.choices(self.tokens, k=samples)),
            "match": time_each(tree.match, keys),
            "admit": time_each(tree.admit, keys),
            "insert": time_each(lambda item: tree.insert(*item), self.extra),
        }
        assert tree.match(self.extra[-1][0]) > 0
        figures["evict_small"] = time_each(tree.evict, itertools.repeat(EVICTED_TOKENS, samples))
        assert tree.evict(EVICTED_TOKENS) >= EVICTED_TOKENS
        return figures


def compare(
    kinds: Sequence[type[Tree]],
    page_size: int,
    shape: dict[str, int],
    *,
    rounds: int,
    samples: int,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Both trees on the same sequences, in turn; the second one first in every other round."""
    results: dict[str, list[dict[str, float]]] = {kind.name: [] for kind in kinds}
    for number in range(rounds):
        sequences = make_sequences(
            shape["count"] + samples, shared=shape["shared"], own=shape["own"], seed=number
        )
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            case = Case(kind(page_size), sequences[: shape["count"]], sequences[shape["count"] :])
            results[kind.name].append(case.measure(random.Random(number), samples=samples))
            del case
            gc.collect()
            tick()
    return summarise_rounds(results)


def summarise_rounds(results: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and of the ratios of each round."""
    operations = list(results["ours"][0])
    report: dict[str, Any] = {
        f"{name}_us": {
            operation: round(statistics.median(figures[operation] for figures in rounds), 2)
            for operation in operations
        }
        for name, rounds in results.items()
    }
    if "sglang" in results:
        report["speedup_vs_sglang"] = {
            operation: round(statistics.median(
                theirs[operation] / ours[operation]
                for ours, theirs in zip(results["ours"], results["sglang"], strict=True)
            ), 2)
            for operation in operations
        }  # fmt: skip
    report["rounds"] = results
    return report


def measure_growth(page_size: int, *, samples: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Our match and insert by length of the key; `exponent`: 1 is proportional, more is worse."""
    lengths = [1024, 4096, 16_384, 65_536]
    by_length: dict[str, dict[str, float]] = {}
    for length in lengths:
        sequences = make_sequences(40, shared=0, own=length, seed=length)
        case = Case(OurTree(page_size), sequences[:20], sequences[20:])
        figures = case.measure(random.Random(0), samples=samples)
        by_length[str(length)] = {name: round(figures[name], 2) for name in ("match", "insert")}
        tick()
    first, last = by_length[str(lengths[0])], by_length[str(lengths[-1])]
    span = math.log(lengths[-1] / lengths[0])
    exponents = {name: round(math.log(last[name] / first[name]) / span, 2) for name in first}
    return {"us_by_tokens": by_length, "exponent": exponents}


SHAPES = {
    "1000x4096": {"count": 1000, "shared": 1024, "own": 3072},
    "10M": {"count": 10_000, "shared": 1024, "own": 1008},
}
"""Sequences, tokens of their common prefix, tokens of their own; the second caches 10,000,000 tokens."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All shapes and page sizes."""
    problem = import_sglang(arguments.sglang)
    kinds: list[type[Tree]] = [OurTree] if problem else [OurTree, SglangTree]
    report: dict[str, Any] = {
        **describe_run(),
        "sglang": {"version": SGLANG_VERSION, "problem": problem, "stand_ins": [*STAND_INS]},
        "evicted_tokens": EVICTED_TOKENS,
    }
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rounds = {"1000x4096": arguments.rounds, "10M": max(1, arguments.rounds // 3)}
        pages = arguments.page_size
        task = progress.add_task("trees", total=len(pages) * (sum(rounds.values()) * len(kinds) + 4))

        def tick() -> None:
            progress.advance(task)

        for page_size in pages:
            report[f"page_{page_size}"] = {
                name: compare(
                    kinds, page_size, shape, rounds=rounds[name], samples=arguments.samples, tick=tick
                )
                for name, shape in SHAPES.items()
            }
            report[f"page_{page_size}"]["growth"] = measure_growth(
                page_size, samples=arguments.samples, tick=tick
            )
    return report


def print_table(report: dict[str, Any], pages: Sequence[int]) -> None:
    """The same for people."""
    table = Table(
        title="Prefix tree, median µs of one operation", caption=str(report["sglang"]["problem"] or "")
    )
    for column in ("tokens cached", "page", "operation", "ours", "SGLang", "speedup"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for page_size, shape in itertools.product(pages, SHAPES):
        figures = report[f"page_{page_size}"][shape]
        for operation, ours in figures["ours_us"].items():
            theirs = figures.get("sglang_us", {}).get(operation, "-")
            speedup = figures.get("speedup_vs_sglang", {}).get(operation, "-")
            table.add_row(shape, str(page_size), operation, str(ours), str(theirs), str(speedup))
    console = Console()
    console.print(table)
    for page_size in pages:
        growth = report[f"page_{page_size}"]["growth"]
        console.print(
            f"page {page_size}: cost grows with the key's length to the power of {growth['exponent']}"
        )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--page-size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5, help="times that each tree is built and measured")
    parser.add_argument("--samples", type=int, default=200, help="calls of each operation in a round")
    parser.add_argument("--sglang", type=Path, default=SGLANG_FOLDER, help="folder that holds its package")
    parser.add_argument("--install-sglang", action="store_true", help="install it there first, with pip")
    parser.add_argument("--even-if-busy", action="store_true", help="measure although the machine is busy")
    arguments = parser.parse_args()
    if arguments.install_sglang:
        install_sglang(arguments.sglang)
    if not arguments.even_if_busy:
        refuse_busy_machine()
    torch.set_num_threads(1)
    report = run(arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report, arguments.page_size)


if __name__ == "__main__":
    main()
