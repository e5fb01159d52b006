"""The whole mesh beside llama.cpp's, vLLM's and transformers' servers: goals P1 and P2.

Ours is measured over gRPC, peers over their HTTP, by one load generator with the same prompts, closed loop.
In each round every server is started, warmed, measured at all concurrencies and stopped, so that only one has
cores, caches and memory (a server that is merely halted comes back to broken heartbeats); every other round
goes through them backwards. A ratio is the median of the rounds' own ratios. `others_cpu_share` is what the
machine did for others just before: threads that spin while they wait suffer from it out of all proportion.

Weights are the same: ours and llama.cpp's as the GGUF holds them, the others' the same values in float32.
What ours loses to float32 stands in `python -m benchmarks.step --quality`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks.peer_servers import SERVERS, UNAVAILABLE, PeerMissing, PeerModel, PeerServer, prepare_model
from benchmarks.plots import save_bars
from benchmarks.report import describe_run, run_command
from benchmarks.running_mesh import running_mesh
from meshkit.errors import MeshError
from meshkit.load import (
    GrpcTarget,
    LoadRequest,
    OpenAiTarget,
    Sample,
    Target,
    describe_samples,
    run_closed_loop,
)

OURS = "chipmesh"
WARM_UP_CLIENTS = 8
WARM_UP_TOKENS = 16
GOALS: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "llama.cpp": {
        "1": {"output_tokens_per_s": 1.3},
        "8": {"output_tokens_per_s": 2.0, "ttft_p50": 0.5},
        "32": {"output_tokens_per_s": 2.0, "ttft_p50": 0.5},
    },
    "vllm": {
        "1": {"output_tokens_per_s": 6.0},
        "8": {"output_tokens_per_s": 3.0},
        "32": {"output_tokens_per_s": 2.0},
    },
}
"""P1 and P2: ours over theirs, at least for tokens/s, at most for TTFT. Made for 100 tokens in and 64 out."""

Figures = dict[str, Any]
Rounds = dict[str, list[dict[str, Figures]]]
"""By system, then by round: the figures by concurrency."""


@dataclass(frozen=True)
class Workload:
    """Token counts, and the requests at once of each load."""

    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    requests_per_client: int = 5


class PeerFailed(Exception):
    """A server did not do the work that it was sent, so its figures would say nothing."""


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens that are a space and letters and that are found again when their text is encoded.

    Prompts of them can be sent as ids or as text and are the same tokens, which not every peer takes as ids.
    """
    texts = {index: tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())}
    plausible = {index: text for index, text in texts.items() if is_word(text)}
    encoded = tokenizer.encode_batch(list(plausible.values()), add_special_tokens=False)
    return [index for index, found in zip(plausible, encoded, strict=True) if found.ids == [index]]


def is_word(text: str) -> bool:
    """A space, then ASCII letters: no tokenizer splits or joins these where they stand in a row."""
    return len(text) > 1 and text[0] == " " and text[1:].isascii() and text[1:].isalpha()


def draw_requests(
    words: Sequence[int], *, count: int, prompt_tokens: int, output_tokens: int, seed: int
) -> list[LoadRequest]:
    """Random prompts that share nothing, the same for the same seed."""
    draw = random.Random(seed)
    return [
        LoadRequest(output_tokens, token_ids=tuple(draw.choices(words, k=prompt_tokens)))
        for _ in range(count)
    ]


def as_text(requests: Sequence[LoadRequest], tokenizer: Tokenizer) -> list[LoadRequest]:
    """The same prompts as text."""
    return [
        replace(request, token_ids=None, text=tokenizer.decode(list(request.token_ids or ())))
        for request in requests
    ]


async def measure_loads(
    target: Target, workload: Workload, words: Sequence[int], *, text_by: Tokenizer | None, round_number: int
) -> dict[str, Figures]:
    """One server at every concurrency, in their order. text_by: send prompts as text.

    Raises:
        PeerFailed: a request failed, was answered short, or had another number of prompt tokens.
    """
    measured: dict[str, Figures] = {}
    for concurrency in workload.concurrency:
        requests = draw_requests(
            words,
            count=workload.requests_per_client * concurrency,
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            seed=1000 * round_number + concurrency,
        )
        warm_up = [
            replace(request, max_tokens=WARM_UP_TOKENS)
            for request in draw_requests(
                words,
                count=min(concurrency, WARM_UP_CLIENTS),
                prompt_tokens=workload.prompt_tokens,
                output_tokens=WARM_UP_TOKENS,
                seed=1000 * round_number + concurrency + 500,
            )
        ]
        if text_by is not None:
            requests, warm_up = as_text(requests, text_by), as_text(warm_up, text_by)
        samples = await run_closed_loop(target, requests, concurrency=concurrency, warmup=warm_up)
        measured[str(concurrency)] = check_figures(samples, prompt_tokens=workload.prompt_tokens)
    return measured


def check_figures(samples: Sequence[Sample], *, prompt_tokens: int) -> Figures:
    """The figures of a run in which all work was done. Raises PeerFailed where it was not."""
    told = describe_samples(samples)
    if told["failed"]:
        raise PeerFailed(f"{told['failed']} of {told['requests']} requests failed: {told['errors']}")
    if told["shorter_than_asked"]:
        raise PeerFailed(f"{told['shorter_than_asked']} of {told['requests']} answers ended early")
    if told["prompt_tokens"] not in (None, prompt_tokens * told["requests"]):
        raise PeerFailed(
            f"{told['prompt_tokens']} prompt tokens in {told['requests']} requests of {prompt_tokens} each"
        )
    shown = ("requests", "output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms", "tokens_per_message")
    return {name: told[name] for name in (*shown, "cached_tokens", "client_cpu_us_per_token")}


def compare(ours: Sequence[Mapping[str, Figures]], theirs: Sequence[Mapping[str, Figures]]) -> dict[str, Any]:
    """By concurrency: ours over theirs in tokens/s and in the median TTFT; medians of the rounds' ratios."""
    return {
        concurrency: {
            "output_tokens_per_s": _median_ratio(ours, theirs, concurrency, _rate),
            "ttft_p50": _median_ratio(ours, theirs, concurrency, _ttft),
        }
        for concurrency in ours[0]
    }


def judge(ratios: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, bool]]:
    """By peer and "CONCURRENCY FIGURE": whether the goal holds; of goals whose load was measured."""
    verdicts: dict[str, dict[str, bool]] = {}
    for peer, by_concurrency in GOALS.items():
        for concurrency, bounds in by_concurrency.items():
            found = ratios.get(peer, {}).get(concurrency)
            if found is None:
                continue
            for figure, bound in bounds.items():
                holds = found[figure] <= bound if figure.startswith("ttft") else found[figure] >= bound
                verdicts.setdefault(peer, {})[f"{concurrency} {figure}"] = holds
    return verdicts


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and the report. Raises SystemExit where ours cannot be measured."""
    workload = Workload(
        tuple(arguments.concurrency),
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.requests_per_client,
    )
    ours = ("--dtype", arguments.dtype, "--quantization", arguments.quantization)
    bench = Bench(prepare_model(arguments.model), ours, workload)
    servers, skipped = find_peers(bench.model, arguments.peers, install=arguments.install)
    rounds: Rounds = {name: [] for name in (OURS, *servers)}
    for number in range(arguments.rounds):
        for name in turn_order([OURS, *servers], number):
            if name in skipped:
                continue
            _tell(f"round {number + 1} of {arguments.rounds}: {name}")
            try:
                rounds[name].append(bench.measure_system(servers.get(name), number))
            except (PeerMissing, PeerFailed, MeshError) as error:
                if name == OURS:
                    raise SystemExit(f"{OURS}: {error}") from error
                skipped[name] = str(error)
                _tell(f"{name} is left out: {error}")
    measured = {name: server for name, server in servers.items() if name not in skipped}
    ratios = {name: compare(rounds[OURS], rounds[name]) for name in measured}
    return {
        **describe_run(),
        "model": bench.model.source.name,
        "flags": list(ours),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "requests_per_client": workload.requests_per_client,
        "peers": {name: describe_peer(server) for name, server in measured.items()},
        "skipped": skipped,
        "ratios": ratios,
        "goals": GOALS,
        "holds": judge(ratios),
        "systems": {name: summarise_rounds(rounds[name]) for name in (OURS, *measured)},
    }


class Bench:
    """What is the same for all systems: the model, its words and the workload."""

    def __init__(self, model: PeerModel, ours: Sequence[str], workload: Workload) -> None:
        """ours: flags of `chipmesh up`."""
        self.model, self._ours, self._workload = model, ours, workload
        self._tokenizer = Tokenizer.from_file(str(model.source.tokenizer_file))
        self._words = word_ids(self._tokenizer)

    def measure_system(self, server: PeerServer | None, round_number: int) -> dict[str, Figures]:
        """Start one system (None: our mesh), measure, stop.

        Raises:
            PeerMissing: it does not start. PeerFailed, MeshError: it does not do its work.
        """
        others = busy_share()
        with self._running(server) as (target, text_by):
            measured = uvloop.run(self._measure(target, text_by, round_number))
        return {name: {**figures, "others_cpu_share": others} for name, figures in measured.items()}

    @contextlib.contextmanager
    def _running(
        self, server: PeerServer | None
    ) -> Iterator[tuple[GrpcTarget | OpenAiTarget, Tokenizer | None]]:
        if server is None:
            with running_mesh("--model-path", str(self.model.gguf), *self._ours) as mesh:
                yield GrpcTarget(mesh["gateway"]["address"]), None
            return
        with server:
            target = OpenAiTarget(server.base_url, model=server.model_name, ignore_eos=server.ignores_eos)
            yield target, None if server.takes_token_ids else self._tokenizer

    async def _measure(
        self, target: GrpcTarget | OpenAiTarget, text_by: Tokenizer | None, round_number: int
    ) -> dict[str, Figures]:
        async with target:
            return await measure_loads(
                target, self._workload, self._words, text_by=text_by, round_number=round_number
            )


def find_peers(
    model: PeerModel, names: Sequence[str], *, install: bool
) -> tuple[dict[str, PeerServer], dict[str, str]]:
    """(servers to start, why the others cannot be), both by name. install: first fetch what is missing."""
    servers: dict[str, PeerServer] = {}
    skipped: dict[str, str] = {}
    for name in names:
        if name in UNAVAILABLE:
            skipped[name] = UNAVAILABLE[name]
            continue
        server = SERVERS[name](model)
        try:
            require_peer(server, install=install)
        except PeerMissing as error:
            skipped[name] = str(error)
        except subprocess.CalledProcessError as error:
            skipped[name] = f"its installation failed: {error}"
        else:
            servers[name] = server
    return servers, skipped


def require_peer(server: PeerServer, *, install: bool) -> None:
    """Raises PeerMissing unless it is there; subprocess.CalledProcessError where it was to be installed."""
    try:
        server.require()
    except PeerMissing:
        if not install:
            raise
        _tell(f"installing {server.name} into {server.folder}; minutes")
        server.install(server.folder)
        server.require()


def turn_order(names: Sequence[str], round_number: int) -> list[str]:
    """Forwards, then backwards, so that a drift of the machine meets all alike."""
    return list(names) if round_number % 2 == 0 else list(reversed(names))


def describe_peer(server: PeerServer) -> dict[str, Any]:
    """Versions, precision of the weights, and the command line, whose port differs from start to start."""
    return {
        "versions": server.versions(),
        "weights": server.precision,
        "command": " ".join(server.command(0)),
    }


def summarise_rounds(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Any]:
    """By concurrency: the medians over rounds of what people look at, and all rounds."""
    return {
        concurrency: {
            "output_tokens_per_s": _median([each[concurrency] for each in rounds], _rate),
            "ttft_p50_ms": _median([each[concurrency] for each in rounds], _ttft),
            "tpot_p50_ms": _median([each[concurrency] for each in rounds], _tpot),
            "rounds": [each[concurrency] for each in rounds],
        }
        for concurrency in rounds[0]
    }


def print_table(report: dict[str, Any]) -> None:
    """One line a system and concurrency, then goals and who was left out."""
    words = f"{'':<14}{'at once':>8}{'tokens/s':>10}{'TTFT ms':>10}{'TPOT ms':>10}"
    print(f"{words}   ours over it: tokens/s, TTFT")
    for name, loads in report["systems"].items():
        for concurrency, told in loads.items():
            ratio = report["ratios"].get(name, {}).get(concurrency)
            shown = f"{ratio['output_tokens_per_s']:>10.2f}{ratio['ttft_p50']:>8.2f}" if ratio else ""
            print(
                f"{name:<14}{concurrency:>8}{told['output_tokens_per_s']:>10.1f}{told['ttft_p50_ms']:>10.0f}"
                f"{told['tpot_p50_ms']:>10.1f}   {shown}"
            )
    for name, verdicts in report["holds"].items():
        words = ", ".join(f"{goal}: {'holds' if holds else 'MISSED'}" for goal, holds in verdicts.items())
        print(f"goals against {name}: {words}")
    for name, reason in report["skipped"].items():
        print(f"{name}: skipped: {reason}")


def draw(file: Path, report: dict[str, Any]) -> None:
    """Bars of tokens/s, one cluster a concurrency."""
    groups: dict[str, dict[str, float]] = {}
    for name, loads in report["systems"].items():
        for concurrency, told in loads.items():
            groups.setdefault(f"{concurrency} at once", {})[name] = told["output_tokens_per_s"]
    tokens = f"{report['prompt_tokens']} tokens in, {report['output_tokens']} out"
    save_bars(file, f"{report['model']}: {tokens}", groups, "output tokens/s")


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores' time, 0 to 1, that was used during the next `seconds`."""
    busy, idle = read_cpu_times(Path("/proc/stat").read_text(encoding="ascii"))
    time.sleep(seconds)
    busy_then, idle_then = read_cpu_times(Path("/proc/stat").read_text(encoding="ascii"))
    return round((busy_then - busy) / max(1, busy_then + idle_then - busy - idle), 3)


def read_cpu_times(text: str) -> tuple[int, int]:
    """(busy, idle) ticks of all cores since the start, from /proc/stat's text; waiting for a disk is idle."""
    ticks = [int(word) for word in text.splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, idle


def _rate(figures: Figures) -> float:
    return float(figures["output_tokens_per_s"])


def _ttft(figures: Figures) -> float:
    return float(figures["ttft_ms"]["p50"])


def _tpot(figures: Figures) -> float:
    return float(figures["tpot_ms"]["p50"])


def _median(figures: Sequence[Figures], read: Callable[[Figures], float]) -> float:
    return round(statistics.median(read(each) for each in figures), 3)


def _median_ratio(
    ours: Sequence[Mapping[str, Figures]],
    theirs: Sequence[Mapping[str, Figures]],
    concurrency: str,
    read: Callable[[Figures], float],
) -> float:
    pairs = zip(ours, theirs, strict=True)
    ratios = [read(one[concurrency]) / read(other[concurrency]) for one, other in pairs]
    return round(statistics.median(ratios), 3)


def _tell(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*SERVERS, *UNAVAILABLE]
    parser.add_argument("--peers", nargs="+", choices=known, default=known)
    parser.add_argument("--install", action="store_true", help="fetch and build peers that are missing")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--requests-per-client", type=int, default=5, help="5 are a fair run, fewer are faster"
    )
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF, or the name of a pulled one")
    parser.add_argument("--dtype", default="auto", help="of the mesh, as `chipmesh up` has it")
    parser.add_argument("--quantization", default="", help="of the mesh, as `chipmesh up` has it: a8")
    # A run takes minutes and is often given a limit: being ended must not leave a server behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run_command(parser, measure, print_table, plot=draw)


if __name__ == "__main__":
    main()
