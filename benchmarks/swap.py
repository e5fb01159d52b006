"""The longest silence of a stream while a worker's chip is swapped, beside what it may be.

A mesh of one worker, greedy streams of a real model in float32, and `chipmesh swap` between two chips. What
runs moves by replay, so a silence may last 1 s and as long as the new chip takes to prefill all tokens of all
streams. The new chip's prefill rate is measured right after each swap, on a prompt that shares nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import uvloop

from benchmarks.report import describe_run, refuse_busy_machine
from benchmarks.running_mesh import running_mesh
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc

ALLOWED_S = 1.0
"""What a silence may last beside the replay (issue "Swap a chip")."""
PROMPT_TOKENS = 32
PREFILL_TOKENS = 512
FLOWING = 8


@dataclass
class Stream:
    """What one client has seen. times: monotonic seconds of each message."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has FLOWING tokens: then it decodes, and its prompt is no part of a silence."""

    def longest_silence(self, since: float) -> tuple[float, float]:
        """(seconds, beginning) between two messages of which the later one came after `since`."""
        pairs = itertools.pairwise(self.times)
        return max(
            ((later - earlier, earlier) for earlier, later in pairs if later > since), default=(0.0, since)
        )


def request_of(prompt: list[int], *, tokens: int) -> inference_pb2.GenerateRequest:
    """A greedy request that runs to its full length."""
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=prompt)),
        sampling=inference_pb2.SamplingOptions(temperature=0.0),
        stop=inference_pb2.StopOptions(max_tokens=tokens, ignore_eos=True),
    )


async def follow(stub: Any, stream: Stream, *, tokens: int) -> None:
    """One generation, its messages timed at their receipt."""
    async for response in stub.Generate(request_of(stream.prompt, tokens=tokens)):
        if response.event.WhichOneof("kind") == "output":
            stream.times.append(time.monotonic())
            stream.token_ids += response.event.output.token_ids
            if len(stream.token_ids) >= FLOWING:
                stream.flows.set()


async def swap_under_streams(
    inference: Any, admin: Any, words: list[str], prompts: list[list[int]], *, tokens: int
) -> tuple[list[Stream], dict[str, Any]]:
    """Streams, a swap once each of them has tokens, and their ends."""
    streams = [Stream(prompt) for prompt in prompts]
    tasks = [asyncio.create_task(follow(inference, stream, tokens=tokens)) for stream in streams]
    await asyncio.gather(*(stream.flows.wait() for stream in streams))
    options = {"emulate": "true"} if "--emulate" in words else {}
    request = admin_pb2.SwapChipRequest(worker="worker-0", backend=words[0], backend_options=options)
    begun, replayed = time.monotonic(), 0
    stages: dict[str, float] = {}
    async for progress in admin.SwapChip(request):
        stages.setdefault(progress.stage, round(time.monotonic() - begun, 3))
        if progress.stage == "fence" or not replayed:
            replayed = sum(len(stream.prompt) + len(stream.token_ids) for stream in streams)
    swap_s = time.monotonic() - begun
    still_running = sum(not task.done() for task in tasks)
    await asyncio.gather(*tasks)
    gap_s, silent_from = max(stream.longest_silence(begun) for stream in streams)
    return streams, {
        "to": " ".join(words),
        "swap_s": round(swap_s, 3),
        "streams_running_at_its_end": still_running,
        "replayed_tokens": replayed,
        "gap_ms": round(gap_s * 1e3, 1),
        "silent_from_s": round(silent_from - begun, 3),
        "stages_s": stages,
    }


async def prefill_rate(inference: Any, draw: random.Random, vocab_size: int) -> float:
    """Prompt tokens per second of an idle mesh, the first token included."""
    stream = Stream([draw.randrange(vocab_size) for _ in range(PREFILL_TOKENS)])
    begun = time.monotonic()
    await follow(inference, stream, tokens=1)
    return PREFILL_TOKENS / (time.monotonic() - begun)


async def run(arguments: argparse.Namespace, mesh: dict[str, Any]) -> dict[str, Any]:
    """Undisturbed streams first, as the reference; then each swap under the same ones."""
    draw = random.Random(0)
    async with (
        grpc.aio.insecure_channel(mesh["gateway"]["address"]) as gateway,
        grpc.aio.insecure_channel(mesh["scheduler"]["address"]) as scheduler,
    ):
        inference: Any = inference_pb2_grpc.InferenceServiceStub(gateway)
        admin: Any = admin_pb2_grpc.AdminServiceStub(scheduler)
        model = (await inference.ListModels(inference_pb2.ListModelsRequest())).models[0]
        prompts = [
            [draw.randrange(model.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(arguments.streams)
        ]
        undisturbed = [Stream(prompt) for prompt in prompts]
        await asyncio.gather(*(follow(inference, each, tokens=arguments.tokens) for each in undisturbed))
        pids = {(await admin.GetMesh(admin_pb2.GetMeshRequest())).mesh.scheduler.pid}
        swaps = []
        for words in arguments.to * arguments.rounds:
            streams, swap = await swap_under_streams(
                inference, admin, words.split(), prompts, tokens=arguments.tokens
            )
            equal = [
                one.token_ids == other.token_ids for one, other in zip(streams, undisturbed, strict=True)
            ]
            rate = await prefill_rate(inference, draw, model.vocab_size)
            bound_s = ALLOWED_S + swap["replayed_tokens"] / rate
            swaps.append({
                **swap,
                "prefill_tokens_per_s": round(rate, 1),
                "allowed_gap_ms": round(bound_s * 1e3, 1),
                "within": swap["gap_ms"] <= bound_s * 1e3,
                "streams_equal_to_undisturbed": sum(equal),
            })  # fmt: skip
            pids.add((await admin.GetMesh(admin_pb2.GetMeshRequest())).mesh.scheduler.pid)
    return {
        **describe_run(),
        "model": model.name,
        "streams": arguments.streams,
        "output_tokens": arguments.tokens,
        "scheduler_pid_unchanged": len(pids) == 1,
        "swaps": swaps,
    }


def main() -> None:
    """Parse the command line, bring a mesh up, swap, print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="accepted for the sake of habit: it is always JSON"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--to", nargs="+", default=["kunlun --emulate", "cpu"], help="chips in turn, from cpu"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream; it must outlast a swap")
    parser.add_argument("--even-if-busy", action="store_true", help="measure although the machine is busy")
    arguments = parser.parse_args()
    if not arguments.even_if_busy:
        refuse_busy_machine()
    with running_mesh("--model-path", arguments.model, "--dtype", "float32") as mesh:
        print(json.dumps(uvloop.run(run(arguments, mesh)), indent=2))


if __name__ == "__main__":
    main()
