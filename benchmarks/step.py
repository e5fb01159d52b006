"""Whole steps of the executor's model runner in one process: decode at several batch sizes, and a prefill.

The native kernel, with `--quantization` once more so, and the plugin's operators take turns, round by round.
Limits of the host are measured in the same run. `fraction_of_fma_limit`: 2 operations a weight and token over
what the host can multiply-add; `fraction_of_bandwidth_limit`: steps/s over those that reading each weight
once at one byte would allow. Quality: perplexity over the tests' texts, and greedy agreement with the
reference's tokens.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import measure_limits, open_library
from benchmarks.report import describe_run, run_command
from plugins.cpu.step_program import CpuStepProgram
from plugins.sdk.registry import load_backend
from plugins.sdk.runner import (
    DecodeRows,
    LoadedModel,
    LoadOptions,
    PrefillRow,
    SamplingSettings,
    SlotAdmission,
    StepBatch,
    StepOutput,
)
from plugins.sdk.timing import StopTiming
from tests.support.golden import load_golden
from worker_svc.model_runner import OperatorModelRunner

PAGE = 16
WARM_UP = 3
_GREEDY = SamplingSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, {}, False, (), 0)
_RANDOM = replace(_GREEDY, temperature=0.8, top_p=0.95)


class Executor:
    """A loaded model whose sequences sit in slots from 0, each with its own run of pages."""

    def __init__(
        self, model: str, options: Mapping[str, str], *, slots: int, tokens: int, quantization: str = ""
    ) -> None:
        """slots, tokens: most sequences, and most tokens of each."""
        self.runner = OperatorModelRunner(load_backend("cpu", options))
        begun = time.perf_counter()
        asked = LoadOptions(model, quantization=quantization)
        self.loaded: LoadedModel = self.runner.load(asked, lambda stage, share: None)
        self.load_s = round(time.perf_counter() - begun, 2)
        self._width = -(-tokens // PAGE)
        self.runner.allocate_kv_cache(page_count=slots * self._width, page_size=PAGE, max_slots=slots)
        self._table = np.arange(slots * self._width, dtype=np.int32).reshape(slots, self._width)

    def prefill(self, slot: int, tokens: Sequence[int], settings: SamplingSettings = _GREEDY) -> StepOutput:
        """A request enters, and all of its prompt is computed."""
        self.runner.admit(SlotAdmission(slot, settings, 0, 0, (), ()), self._table[slot])
        row = PrefillRow(slot, 0, np.array(tokens, dtype=np.int32), self._table[slot], samples=True)
        return self.runner.run_step(StepBatch(None, [row]))

    def decode(self, batch: int, position: int) -> StepOutput:
        """One token for each of the first `batch` slots, all at `position`."""
        rows = DecodeRows(
            slots=np.arange(batch, dtype=np.int32),
            positions=np.full(batch, position, dtype=np.int32),
            page_table=self._table[:batch],
        )
        return self.runner.run_step(StepBatch(rows, []))

    @property
    def program(self) -> CpuStepProgram | None:
        """The native program, where it serves."""
        loaded = self.runner._loaded
        model = loaded.model if loaded is not None else None
        return model if isinstance(model, CpuStepProgram) else None


def random_tokens(count: int, vocab_size: int) -> list[int]:
    """Token ids from all over the vocabulary."""
    tokens: list[int] = np.random.default_rng(count).integers(0, vocab_size, count).tolist()
    return tokens


def time_decode(
    executor: Executor, batch: int, steps: int, settings: SamplingSettings, *, context: int
) -> dict[str, Any]:
    """Median step, from `context` tokens on, and where the program's time goes."""
    executor.runner.reset()
    prompt = random_tokens(context, executor.loaded.vocab_size)
    for slot in range(batch):
        executor.prefill(slot, prompt, settings)
    program, seconds, stop = executor.program, [], None
    for step in range(WARM_UP + steps):
        if step == WARM_UP and program is not None:
            stop = program.start_timing(most_runs=0)
        begun = time.perf_counter()
        executor.decode(batch, context + step)
        seconds.append(time.perf_counter() - begun)
    median = statistics.median(seconds[WARM_UP:])
    shares = _shares(stop, sum(seconds[WARM_UP:]))
    return {"step_ms": round(median * 1e3, 3), "tokens_per_s": round(batch / median, 1), "shares": shares}


def _shares(stop: StopTiming | None, seconds: float) -> dict[str, float]:
    """Share of each operator of the program in `seconds`."""
    totals = stop().totals if stop is not None else ()
    return {total.operator.name: round(total.seconds / seconds, 3) for total in totals}


def time_prefill(executor: Executor, tokens: int) -> dict[str, Any]:
    """One prompt in one step."""
    executor.runner.reset()
    prompt, program = random_tokens(tokens, executor.loaded.vocab_size), executor.program
    stop = program.start_timing(most_runs=0) if program is not None else None
    begun = time.perf_counter()
    executor.prefill(0, prompt)
    seconds = time.perf_counter() - begun
    shares = _shares(stop, seconds)
    return {
        "step_ms": round(seconds * 1e3, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "shares": shares,
    }


def measure_quality(executor: Executor) -> dict[str, Any]:
    """Perplexity over the tests' texts (prompt and reference continuation, one token a step), and the share
    of the reference's greedy tokens that come out at their places.
    """
    settings = replace(_GREEDY, logprobs=True)
    losses: list[float] = []
    agreed = asked = 0
    for golden in load_golden():
        executor.runner.reset()
        text = golden.prompt_token_ids + golden.token_ids
        losses += forced_losses(executor, text, settings)
        made = continue_greedily(executor, golden.prompt_token_ids, len(golden.token_ids))
        agreed += sum(a == b for a, b in zip(made, golden.token_ids, strict=True))
        asked += len(golden.token_ids)
    return {
        "perplexity": round(math.exp(statistics.fmean(losses)), 5),
        "tokens": len(losses),
        "greedy_agreement": round(agreed / asked, 4),
    }


def forced_losses(executor: Executor, text: Sequence[int], settings: SamplingSettings) -> list[float]:
    """-log p of each token of a text after those before it."""
    losses = []
    for end in range(1, len(text)):
        # A bias that leaves one choice makes the runner tell the raw log-probability of that very token.
        forced = replace(settings, logit_bias={text[end]: 1e6})
        executor.runner.release(0)
        executor.runner.admit(SlotAdmission(0, forced, 0, 0, (), ()), executor._table[0])
        tokens = np.array(text[end - 1 : end], dtype=np.int32)
        row = PrefillRow(0, end - 1, tokens, executor._table[0], samples=True)
        output = executor.runner.run_step(StepBatch(None, [row]))
        assert output.logprobs is not None
        losses.append(-float(output.logprobs[0]))
    return losses


def continue_greedily(executor: Executor, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens after a prompt."""
    executor.runner.release(0)
    made = [int(executor.prefill(0, prompt).token_ids[0])]
    while len(made) < count:
        made.append(int(executor.decode(1, len(prompt) + len(made) - 1).token_ids[0]))
    return made


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turns; medians over rounds."""
    library = open_library()
    threads = arguments.threads or torch.get_num_threads()
    sides = _open_sides(arguments, threads)
    instruction_set = "" if arguments.kernel == "auto" else arguments.kernel
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    limits = []
    settings = _RANDOM if arguments.random else _GREEDY
    for _ in range(arguments.rounds):
        limits.append(measure_limits(library, instruction_set, threads))
        for name, executor in sides.items():
            rounds[name].append(_one_round(executor, arguments, settings))
    limit = {key: statistics.median(each[key] for each in limits) for key in limits[0]}
    results = {name: summarise_rounds(each) for name, each in rounds.items()}
    weights = count_weights(sides["native"].loaded, arguments.model)
    return {
        **describe_run(),
        "model": arguments.model,
        "context_tokens": arguments.context,
        "quantization": arguments.quantization,
        "threads": threads,
        "instruction_set": instruction_set or library.instruction_set,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_s": {name: executor.load_s for name, executor in sides.items()},
        "weight_bytes": {name: executor.loaded.weight_bytes for name, executor in sides.items()},
        "numeric_class": {name: executor.loaded.numeric_class for name, executor in sides.items()},
        "limits": {**limit, "rounds": limits},
        **fractions(results["native"], limit, weights),
        **results,
        "quantized_fractions": fractions(results["quantized"], limit, weights)
        if "quantized" in results
        else None,
        "quality": {name: measure_quality(executor) for name, executor in sides.items()}
        if arguments.quality
        else None,
        "rounds": rounds,
    }


def _open_sides(arguments: argparse.Namespace, threads: int) -> dict[str, Executor]:
    """native; quantized, where that is asked for; operators."""
    tokens = max(arguments.context + WARM_UP + arguments.steps + 1, arguments.prefill + 1, 400)
    asked = {"native": (arguments.kernel, ""), "operators": ("off", "")}
    if arguments.quantization:
        asked["quantized"] = (arguments.kernel, arguments.quantization)
    return {
        name: Executor(
            arguments.model,
            {"threads": str(threads), "kernel": kernel},
            slots=max(arguments.batch),
            tokens=tokens,
            quantization=quantization,
        )
        for name, (kernel, quantization) in asked.items()
    }


def _one_round(
    executor: Executor, arguments: argparse.Namespace, settings: SamplingSettings
) -> dict[str, Any]:
    decode = {
        str(batch): time_decode(executor, batch, arguments.steps, settings, context=arguments.context)
        for batch in arguments.batch
    }
    return {"decode": decode, "prefill": time_prefill(executor, arguments.prefill)}


def count_weights(loaded: LoadedModel, model: str) -> dict[str, int]:
    """Weights that a decoded token is multiplied with, and those of a prefilled one: without the head."""
    from meshkit.modelstore import default_cache_dir, open_model, tensor_shapes  # noqa: PLC0415

    config = open_model(model, cache_dir=default_cache_dir()).config
    shapes = tensor_shapes(config).items()
    layers = sum(math.prod(shape) for name, shape in shapes if ".layers." in name and len(shape) == 2)
    return {"decode": layers + loaded.vocab_size * config["hidden_size"], "prefill": layers}


def fractions(
    native: Mapping[str, Any], limit: Mapping[str, float], weights: Mapping[str, int]
) -> dict[str, Any]:
    """What the native side reaches of the host's limits, by batch size."""
    fma = {key: limit["gflops"] * 1e9 / (2 * count) for key, count in weights.items()}
    int8 = limit["read_gbytes_per_s"] * 1e9 / weights["decode"]
    by_batch = native["decode"]
    return {
        "fma_limit_tokens_per_s": {key: round(value, 1) for key, value in fma.items()},
        "int8_bandwidth_limit_tokens_per_s": round(int8, 1),
        "fraction_of_fma_limit": {
            **{batch: round(each["tokens_per_s"] / fma["decode"], 3) for batch, each in by_batch.items()},
            "prefill": round(native["prefill"]["tokens_per_s"] / fma["prefill"], 3),
        },
        "fraction_of_bandwidth_limit": {
            batch: round(each["tokens_per_s"] / int(batch) / int8, 3) for batch, each in by_batch.items()
        },
    }


def summarise_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; the shares of the first."""

    def median(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        keys = ("step_ms", "tokens_per_s")
        medians = {key: round(statistics.median(each[key] for each in of), 2) for key in keys}
        return {**medians, "shares": of[0].get("shares") or {}}

    batches = rounds[0]["decode"]
    decode = {batch: median([each["decode"][batch] for each in rounds]) for batch in batches}
    return {"decode": decode, "prefill": median([each["prefill"] for each in rounds])}


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    limits = {key: value for key, value in report["limits"].items() if key != "rounds"}
    print(f"{report['instruction_set']}, threads: {report['threads']}, limits: {limits}")
    operators = report["operators"]
    print_side("native", report["native"], operators, report)
    if report["quantized_fractions"] is not None:
        print_side(report["quantization"], report["quantized"], operators, report["quantized_fractions"])
    print(f"quality   : {report['quality']}")


def print_side(
    name: str, side: Mapping[str, Any], operators: Mapping[str, Any], shares: Mapping[str, Any]
) -> None:
    """Lines of one side. shares: as `fractions` gives them."""
    for batch, line in side["decode"].items():
        print(
            f"{name:>6} decode {batch:>3}: {line['tokens_per_s']:>8} tokens/s, "
            f"{shares['fraction_of_fma_limit'][batch]:.2f} of the FMA limit, "
            f"{shares['fraction_of_bandwidth_limit'][batch]:.2f} of the int8 bandwidth limit; "
            f"by operators {operators['decode'][batch]['tokens_per_s']}; {line['shares']}"
        )
    print(
        f"{name:>6} prefill   : {side['prefill']['tokens_per_s']:>8} tokens/s, "
        f"{shares['fraction_of_fma_limit']['prefill']:.2f} of the FMA limit; "
        f"by operators {operators['prefill']['tokens_per_s']}; {side['prefill']['shares']}"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--context", type=int, default=100, help="tokens of each sequence before its decode")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: torch's, which follows OMP_NUM_THREADS")
    parser.add_argument(
        "--kernel", default="auto", help="as the plugin's option: auto, avx512_vnni, avx512, avx2, ..."
    )
    parser.add_argument("--quantization", default="", help="measure this too, as a8, beside none")
    parser.add_argument(
        "--random", action="store_true", help="temperature 0.8, top-p 0.95 in place of greedy"
    )
    parser.add_argument(
        "--quality", action="store_true", help="perplexity and greedy agreement too (minutes)"
    )
    run_command(parser, run, print_table, words)


if __name__ == "__main__":
    main()
