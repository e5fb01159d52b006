"""Throughput, TTFT and TPOT of a running mesh, closed loop over gRPC.

TTFT is request sent to first token received; TPOT is (last - first token) / (output tokens - 1); times are
taken on receipt. Prompts are random token ids: nothing is shared, so the prefix cache has no part in them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvloop

from benchmarks.report import describe_run, refuse_busy_machine, summarise
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class Load:
    """One closed loop: `concurrency` clients that each send the next request when the last one ended."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Sample:
    """What one client saw of one stream; seconds."""

    ttft_s: float
    tpot_s: float
    tokens: int
    messages: int


def make_request(load: Load, *, vocab_size: int, draw: random.Random) -> inference_pb2.GenerateRequest:
    """A greedy request of random token ids that runs to its full length."""
    token_ids = [draw.randrange(vocab_size) for _ in range(load.prompt_tokens)]
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=token_ids)),
        sampling=inference_pb2.SamplingOptions(temperature=0.0),
        stop=inference_pb2.StopOptions(max_tokens=load.output_tokens, ignore_eos=True),
    )


async def run_one(stub: Any, request: inference_pb2.GenerateRequest) -> Sample:
    """One stream, timed at the client."""
    sent = time.perf_counter()
    first = last = sent
    tokens = messages = 0
    async for response in stub.Generate(request):
        if response.event.WhichOneof("kind") != "output":
            continue
        last = time.perf_counter()
        first = last if tokens == 0 else first
        tokens += len(response.event.output.token_ids)
        messages += 1
    return Sample(first - sent, (last - first) / max(1, tokens - 1), tokens, messages)


async def run_load(stub: Any, load: Load, *, vocab_size: int, seed: int) -> dict[str, Any]:
    """One run of a load: output tokens per second over the whole run, TTFT and TPOT in milliseconds."""
    draw = random.Random(seed)
    waiting = [make_request(load, vocab_size=vocab_size, draw=draw) for _ in range(load.requests)]
    samples: list[Sample] = []

    async def client() -> None:
        while waiting:
            samples.append(await run_one(stub, waiting.pop()))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    elapsed = time.perf_counter() - started
    tokens = sum(sample.tokens for sample in samples)
    return {
        "output_tokens_per_s": round(tokens / elapsed, 1),
        "ttft_ms": summarise([sample.ttft_s * 1e3 for sample in samples]),
        "tpot_ms": summarise([sample.tpot_s * 1e3 for sample in samples]),
        "tokens_per_message": round(tokens / sum(sample.messages for sample in samples), 2),
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All loads, each `runs` times, the loads interleaved so that drift meets all alike."""
    async with grpc.aio.insecure_channel(arguments.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        model = (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0]
        loads = [
            Load(concurrency, max(5 * concurrency, 8), arguments.prompt_tokens, arguments.output_tokens)
            for concurrency in arguments.concurrency
        ]
        runs: dict[int, list[dict[str, Any]]] = {load.concurrency: [] for load in loads}
        for round_number in range(arguments.runs):
            for load in loads:
                result = await run_load(stub, load, vocab_size=model.vocab_size, seed=round_number)
                runs[load.concurrency].append(result)
    return {
        **describe_run(),
        "model": model.name,
        "prompt_tokens": arguments.prompt_tokens,
        "output_tokens": arguments.output_tokens,
        "concurrency": {
            str(concurrency): {
                "median_output_tokens_per_s": statistics.median(
                    run["output_tokens_per_s"] for run in results
                ),
                "runs": results,
            }
            for concurrency, results in runs.items()
        },
    }


def main() -> None:
    """Parse the command line, run, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="the gateway's gRPC address")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--even-if-busy", action="store_true", help="measure although the machine is busy")
    arguments = parser.parse_args()
    if not arguments.even_if_busy:
        refuse_busy_machine()
    print(json.dumps(uvloop.run(run(arguments)), indent=2))


if __name__ == "__main__":
    main()
