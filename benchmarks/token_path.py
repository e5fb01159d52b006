"""Processor time of a token in gateway and scheduler, their own code alone: one process, no gRPC, no model.

Messages are made beforehand and parsed from bytes, as gRPC hands them over. What a busy machine does to a
whole mesh (fewer tokens a message, so more messages a token) it cannot do here: only the code counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from benchmarks.report import describe_run, run_command
from benchmarks.tracing_calls import Unobserved
from chipmesh.device.v1alpha1 import execution_pb2, sampling_pb2
from chipmesh.inference.v1alpha1 import inference_pb2
from chipmesh.scheduler.v1alpha1 import session_pb2
from gateway.generation_spec import GenerationSpec, Placed, Sampling, StopConditions
from gateway.live_request import LiveRequest, OutputReader
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.output_text import OutputText
from gateway.servicer import fill_output
from gateway.session_client import SessionClient, SessionSettings
from gateway.text import IncrementalDetokenizer, Tokenizer
from meshkit.modelstore import default_cache_dir, open_model
from meshkit.telemetry.metrics import Metrics
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.core.structures import ReplicaId, ReplicaLimits
from scheduler_svc.engine import Engine
from scheduler_svc.live_request import ReplicaInfo
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.session import Session
from scheduler_svc.step_codec import decode_result, encode_plans
from scheduler_svc.step_time import StepTimes

TOKENS = 256
"""Of each stream."""
MESSAGE_TOKENS = 16
"""That a stream gathers for its client's next message."""
PROMPT = list(range(100, 116))
SAMPLING = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, seed=1)
REPLICA = ReplicaId("worker/1")
TIMES = StepTimes(wall_s=0.004, device_s=0.004, idle_s=0.00002)
clock = time.process_time_ns


class Timed(Unobserved):
    """Counts a request's tokens as the gateway does."""

    def __init__(self, timer: RequestTimer) -> None:
        self._timer = timer

    def on_placed(self, placement: Placed) -> None:
        """See LiveRequestObserver."""
        self._timer.placed(placement)

    def on_tokens(self, count: int) -> None:
        """See LiveRequestObserver."""
        self._timer.tokens(count)


# ---------------------------------------------------------------- the gateway


async def measure_gateway(streams: int, tokens_per_event: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Nanoseconds a token: taking the scheduler's events in, and making the clients' messages."""
    channel = grpc.aio.insecure_channel("127.0.0.1:1")  # Never connected.
    client = SessionClient(channel, gateway_id="benchmark", settings=SessionSettings())
    metrics = GatewayMetrics(Metrics())
    readers = [_submit(client, number, metrics, tokenizer) for number in range(streams)]
    client._dispatch(_placed(streams))
    took_in = gave_out = 0
    waiting = 0
    for message in _token_messages(streams, tokens_per_event, tokenizer.vocab_size):
        begun = clock()
        client._dispatch(session_pb2.OpenSessionResponse.FromString(message))
        read = clock()
        took_in += read - begun
        waiting += tokens_per_event
        if waiting >= MESSAGE_TOKENS:
            waiting = 0
            _write(readers)
            gave_out += clock() - read
    await channel.close()
    tokens = streams * TOKENS
    return {"take in": took_in / tokens, "give out": gave_out / tokens}


def _submit(
    client: SessionClient, number: int, metrics: GatewayMetrics, tokenizer: Tokenizer
) -> OutputReader:
    spec = GenerationSpec(f"r{number}", "m", PROMPT, SAMPLING, StopConditions(2 * TOKENS), end_token_ids=())
    text = OutputText(IncrementalDetokenizer(tokenizer, PROMPT), stop_strings=())
    request = LiveRequest(spec, text=text, observer=Timed(RequestTimer(metrics, "m")))
    client.submit(request)
    return request.attach()


def _placed(streams: int) -> session_pb2.OpenSessionResponse:
    message = session_pb2.OpenSessionResponse()
    for number in range(1, streams + 1):
        message.events.add(request_number=number).placed.worker = "worker"
    return message


def _token_messages(streams: int, tokens_per_event: int, vocab_size: int) -> list[bytes]:
    draw = random.Random(1)
    messages = []
    for start in range(0, TOKENS, tokens_per_event):
        message = session_pb2.OpenSessionResponse()
        for number in range(1, streams + 1):
            tokens = message.events.add(request_number=number).tokens
            tokens.first_index = start
            tokens.token_ids.extend(draw.randrange(vocab_size) for _ in range(tokens_per_event))
        messages.append(message.SerializeToString())
    return messages


def _write(readers: Sequence[OutputReader]) -> None:
    for reader in readers:
        output = reader.take()
        if output is not None:
            response = inference_pb2.GenerateResponse()
            fill_output(response.event.output, output)
            response.SerializeToString()


# ---------------------------------------------------------------- the scheduler


async def measure_scheduler(streams: int, steps_per_message: int) -> dict[str, float]:
    """Nanoseconds a token: planning and coding steps, applying their results, and making the gateway's
    message.
    """
    engine, session = _make_engine(streams), Session("gateway")
    for number in range(1, streams + 1):
        engine.submit(session, number, _submission(number))
    batches = session.batches()
    executor = _Executor()
    planned = applied = told = made = 0
    while len(session.requests) < streams or made < streams * TOKENS:
        begun = clock()
        plans = [plan for _ in range(steps_per_message) if (plan := engine.plan_step(REPLICA)) is not None]
        request = encode_plans(plans, epoch=1).SerializeToString()
        sent = clock()
        answer = executor.answer(request)
        received = clock()
        for result in execution_pb2.ExecuteStepsResponse.FromString(answer).results:
            engine.apply_step(REPLICA, decode_result(result), TIMES)
            made += len(result.slots)
        done = clock()
        (await anext(batches)).SerializeToString()
        planned, applied, told = planned + sent - begun, applied + done - received, told + clock() - done
    return {"plan": planned / made, "apply": applied / made, "tell": told / made}


def _make_engine(streams: int) -> Engine:
    core = MeshCore()
    core.configure_group("g", model="m", weight=1.0)
    engine = Engine(core, metrics=SchedulerMetrics(Metrics()), identity_check_delay_s=10)
    info = ReplicaInfo(
        REPLICA, worker="w", group="g", model="m", chip="c", numeric_class="c", vocab_size=50_000
    )
    limits = ReplicaLimits(
        page_count=streams * (2 * TOKENS // 16 + 4), page_size=16, max_running_requests=streams,
        chunk_tokens=streams * len(PROMPT) * 2, context_tokens=4 * TOKENS,
    )  # fmt: skip
    engine.add_replica(info, limits, wake=lambda: None)
    return engine


def _submission(number: int) -> session_pb2.SubmitRequest:
    prompt = [(number * 31 + index * 7) % 40_000 for index in range(len(PROMPT))]
    sampling = sampling_pb2.SamplingParameters(temperature=0, top_p=1, repetition_penalty=1)
    return session_pb2.SubmitRequest(
        request_id=str(number), model="m", prompt_token_ids=prompt, max_output_tokens=2 * TOKENS,
        sampling=sampling,
    )  # fmt: skip


class _Executor:
    """Answers every plan with a token for each slot, in the order that the contract asks for."""

    def __init__(self) -> None:
        self._slots: list[int] = []

    def answer(self, request: bytes) -> bytes:
        """The results of the request's plans."""
        response = execution_pb2.ExecuteStepsResponse()
        for plan in execution_pb2.ExecuteStepsRequest.FromString(request).plans:
            slots = list(self._slots) if plan.decode else []
            joined = [chunk.slot for chunk in plan.prefill if chunk.last]
            self._slots += joined
            slots += joined
            result = response.results.add(epoch=plan.epoch, step_seq=plan.step_seq)
            result.slots.extend(slots)
            result.token_ids.extend([7] * len(slots))
        return response.SerializeToString()


# ---------------------------------------------------------------- the report


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The best of the rounds for each size of message."""
    tokenizer = Tokenizer(open_model(arguments.model, cache_dir=default_cache_dir()))
    rows = []
    for size in arguments.steps:
        gateway = [
            asyncio.run(measure_gateway(arguments.streams, size, tokenizer)) for _ in range(arguments.rounds)
        ]
        scheduler = [asyncio.run(measure_scheduler(arguments.streams, size)) for _ in range(arguments.rounds)]
        rows.append({"steps": size, "gateway_ns": _best(gateway), "scheduler_ns": _best(scheduler)})
    return {**describe_run(), "streams": arguments.streams, "rows": rows}


def _best(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(min(each[key] for each in rounds), 1) for key in rounds[0]}


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    for row in report["rows"]:
        for service in ("gateway", "scheduler"):
            parts = row[f"{service}_ns"]
            told = ", ".join(f"{name} {ns:.0f}" for name, ns in parts.items())
            print(f"{row['steps']} tokens an event, {service}: {sum(parts.values()):.0f} ns a token ({told})")


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4], help="that a message carries")
    parser.add_argument("--rounds", type=int, default=3)
    run_command(parser, run, print_table, words)


if __name__ == "__main__":
    main()
