"""The executor's engine and the batcher in one process, without gRPC: the other side of `overhead`.

`python -m benchmarks.inproc MODEL PAGES PAGE_SIZE SLOTS CHUNK` reads one load a line from its standard
input, as JSON with the fields of `Load`, and answers each with a line: tokens and seconds. Steps are
planned, coded, run and applied one after another on one thread, so nothing overlaps, and nothing has to be
sent.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace

from benchmarks.mesh import Load
from chipmesh.device.v1alpha1 import execution_pb2, sampling_pb2
from meshkit.load import random_tokens
from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.policy import make_policy
from scheduler_svc.core.structures import Finished, ReplicaId, ReplicaLimits, Request, RequestId
from scheduler_svc.step_codec import decode_result, encode_plans
from worker_svc.plugin_loader import load_plugin
from worker_svc.step_engine import StepEngine

GREEDY = sampling_pb2.SamplingParameters(temperature=0.0, top_p=1.0, repetition_penalty=1.0)


class InProcess:
    """A model on the `cpu` plugin, in this process. Raises MeshError where it does not load."""

    def __init__(self, model: str, *, pages: int, page_size: int, slots: int, chunk_tokens: int) -> None:
        self._engine = StepEngine(load_plugin("cpu", {}).runner)
        loaded = self._engine.load(execution_pb2.LoadModelRequest(model_path=model, dtype="float32"), _silent)
        self._engine.allocate(
            execution_pb2.AllocateKvCacheRequest(
                page_count=pages, page_size_tokens=page_size, max_slots=slots
            )
        )
        self._vocab_size = loaded.vocab_size
        self._limits = ReplicaLimits(pages, page_size, slots, chunk_tokens, loaded.context_tokens)

    def run(self, load: Load) -> dict[str, float]:
        """`tokens` made, and `seconds` from the first request to the last one's end."""
        requests = _make_requests(load, vocab_size=self._vocab_size)
        batcher = Batcher(limits=self._limits, policy=make_policy("fcfs"), replica=ReplicaId("inproc/1"))
        epoch = self._engine.attach().epoch
        begun = time.perf_counter()
        for request in requests[: load.concurrency]:
            batcher.add(request)
        waiting = iter(requests[load.concurrency :])
        while (plan := batcher.plan()) is not None:
            batcher.take_events()
            outcome = self._engine.execute(encode_plans([plan], epoch=epoch).plans[0])
            for event in batcher.apply(decode_result(outcome.to_proto())):
                if isinstance(event, Finished) and (following := next(waiting, None)) is not None:
                    batcher.add(following)
        return {
            "tokens": sum(len(request.output) for request in requests),
            "seconds": time.perf_counter() - begun,
        }


def _make_requests(load: Load, *, vocab_size: int) -> list[Request]:
    prompts = random_tokens(
        load.requests,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        vocab_size=vocab_size,
        seed=load.seed,
    )
    payload = SimpleNamespace(sampling=GREEDY, traceparent="")
    return [
        Request(RequestId(number), "m", prompt.token_ids or (), prompt.max_tokens, payload=payload)
        for number, prompt in enumerate(prompts)
    ]


def _silent(stage: str, fraction: float) -> None:
    del stage, fraction


def main(words: Sequence[str]) -> None:
    """Load the model, say so by an empty line, then answer each load."""
    model, *numbers = words
    pages, page_size, slots, chunk_tokens = map(int, numbers)
    executor = InProcess(model, pages=pages, page_size=page_size, slots=slots, chunk_tokens=chunk_tokens)
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(executor.run(Load(**json.loads(line)))), flush=True)


def describe_load(load: Load) -> str:
    """One line of the standard input."""
    return json.dumps(dataclasses.asdict(load)) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
