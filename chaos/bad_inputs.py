"""Bad inputs, made systematically: for each field of each request all that it may not hold. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from chaos.mesh import CONTEXT_TOKENS, MODEL, TEXT_MODEL, VOCAB_SIZE
from chipmesh.device.v1alpha1 import plugin_pb2
from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.scheduler.v1alpha1 import admin_pb2, registry_pb2

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
EXISTS, FORBIDDEN = grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION

INFERENCE = "chipmesh.inference.v1alpha1.InferenceService"
ADMIN = "chipmesh.scheduler.v1alpha1.AdminService"
REGISTRY = "chipmesh.scheduler.v1alpha1.WorkerRegistryService"

KNOWN_ID = "chaos-known-request"
"""A request that has ended at the gateway: `known_request`, with `KNOWN_TOKENS` tokens."""
KNOWN_TOKENS = 3
WORKER, GROUP = "worker-0", "default"
UINT32, INT32_MIN = 2**32 - 1, -(2**31)
NOT_NUMBERS = (math.nan, math.inf, -math.inf)
STRANGE_NAMES = (
    "nope", "Worker-0", "worker-0 ", "default ", "x" * 1000, "..", "worker-0\x00", "two\nlines",
    "w\u00f6rker", "%s%n", "{0.__class__}", "' or 1=1", "\u202eevil",
)  # fmt: skip
UNPRINTABLE = [chr(code) for code in (*range(32), 0x7F, 0x85, 0xA0, 0x200B, 0x2028, 0x202E, 0xE000, 0xFEFF)]

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class BadInput:
    """A request, and how it has to be refused. method: "package.Service/Method"."""

    method: str
    request: Message
    code: grpc.StatusCode
    field: str


def known_request() -> pb.GenerateRequest:
    """The request that some of the others refer to."""
    return _generate(lambda r: _set(r, request_id=KNOWN_ID, **{"stop.max_tokens": KNOWN_TOKENS}))


def all_bad_inputs() -> list[BadInput]:
    """All of them, each different."""
    return [*_of_generate(), *_of_resume(), *_of_tokenize(), *_of_admin(), *_of_registry()]


# ---------------------------------------------------------------- making messages


def _set(message: M, **values: Any) -> M:
    """Set fields by their paths."""
    for path, value in values.items():
        *parents, name = path.split(".")
        target: Any = message
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, (list, tuple)):
            del getattr(target, name)[:]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message


def _generate(change: Callable[[pb.GenerateRequest], object]) -> pb.GenerateRequest:
    """A good request, and one change to it."""
    request = pb.GenerateRequest(model=MODEL)
    request.prompt.tokens.token_ids.extend([1, 2, 3])
    request.sampling.temperature = 0.0
    request.stop.max_tokens = 4
    change(request)
    return request


def _with_prompt(request: pb.GenerateRequest, prompt: pb.Prompt, *, model: str = MODEL) -> None:
    request.model = model
    request.prompt.CopyFrom(prompt)


# ---------------------------------------------------------------- Generate


def _of_generate() -> Iterator[BadInput]:
    method = f"{INFERENCE}/Generate"

    def bad(code: grpc.StatusCode, field: str, **values: Any) -> BadInput:
        return BadInput(method, _generate(lambda request: _set(request, **values)), code, field)

    for name in STRANGE_NAMES:
        yield bad(MISSING, "model", model=name)
    yield bad(INVALID, "model", model="")
    yield from _of_sampling(bad)
    yield from _of_stop(bad)
    yield from _of_scheduling(bad)
    yield from _of_request_id(bad)
    yield from _of_token_lists(bad)
    yield from _of_given_output(bad)
    for prompt, model, code, field in _bad_prompts():
        request = _generate(lambda _: None)
        _with_prompt(request, prompt, model=model)
        yield BadInput(method, request, code, field)


Bad = Callable[..., BadInput]


def _of_sampling(bad: Bad) -> Iterator[BadInput]:
    outside = {
        "temperature": (-0.001, -1, 100.01, 1e30),
        "top_p": (0, -0.001, -1, 1.001, 2, 1e30),
        "min_p": (-0.001, -1, 1.001, 2, 1e30),
        "repetition_penalty": (0, -0.001, -1, 10.01, 1e30),
        "presence_penalty": (-2.01, -1e30, 2.01, 1e30),
        "frequency_penalty": (-2.01, -1e30, 2.01, 1e30),
    }
    for name, values in outside.items():
        for value in (*NOT_NUMBERS, *values):
            yield bad(INVALID, f"sampling.{name}", **{f"sampling.{name}": value})
    for top_k in (-2, -3, -1000, INT32_MIN):
        yield bad(INVALID, "sampling.top_k", **{"sampling.top_k": top_k})
    for token_id in (VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, UINT32):
        yield _bias(token_id, 1.0)
    for token_id in (0, VOCAB_SIZE - 1):
        for value in (*NOT_NUMBERS, 100.5, -100.5, 1e30):
            yield _bias(token_id, value)


def _bias(token_id: int, value: float) -> BadInput:
    request = _generate(lambda r: r.sampling.logit_bias.update({token_id: value}))
    return BadInput(f"{INFERENCE}/Generate", request, INVALID, f"sampling.logit_bias[{token_id}]")


def _of_stop(bad: Bad) -> Iterator[BadInput]:
    for count in (0, -1, -1000, INT32_MIN):
        yield bad(INVALID, "stop.max_tokens", **{"stop.max_tokens": count})
    for count in (5, 1000, 2**31, UINT32):
        yield bad(INVALID, "stop.min_tokens", **{"stop.min_tokens": count})
    yield bad(FORBIDDEN, "stop.stop_strings", **{"stop.stop_strings": ["x"]})
    text = {"model": TEXT_MODEL}
    for count in (17, 100, 1000):
        yield bad(INVALID, "stop.stop_strings", **text, **{"stop.stop_strings": ["x"] * count})
    for wrong in ("", "x" * 257, "\u00e4" * 1000):
        for index in (0, 1, 15):
            strings = ["x"] * index + [wrong]
            yield bad(INVALID, f"stop.stop_strings[{index}]", **text, **{"stop.stop_strings": strings})


def _of_scheduling(bad: Bad) -> Iterator[BadInput]:
    for priority in (1001, -1001, 2**31 - 1, INT32_MIN):
        yield bad(INVALID, "scheduling.priority", **{"scheduling.priority": priority})
    for name in ("cache_salt", "session_key"):
        for text in ("x" * 257, "\u00e4" * 257, "x" * 100_000):
            yield bad(INVALID, f"scheduling.{name}", **{f"scheduling.{name}": text})
    for window in (60_001, 2**31, UINT32):
        yield bad(INVALID, "scheduling.resume_window_ms", **{"scheduling.resume_window_ms": window})


def _of_request_id(bad: Bad) -> Iterator[BadInput]:
    for length in (129, 1000, 100_000):
        yield bad(INVALID, "request_id", request_id="x" * length)
    for character in UNPRINTABLE:
        yield bad(INVALID, "request_id", request_id=f"id{character}")
    differing: list[dict[str, Any]] = [
        {"prompt.tokens.token_ids": [1, 2, 4]},
        {"sampling.top_k": 5},
        {"sampling.min_p": 0.5},
        {"sampling.temperature": 1.0},
        {"stop.max_tokens": KNOWN_TOKENS + 1},
        {"stop.stop_token_ids": [7]},
        {"stop.ignore_eos": True},
        {"logprobs": True},
    ]
    for change in differing:
        values = {"stop.max_tokens": KNOWN_TOKENS, **change}
        yield bad(EXISTS, "request_id", request_id=KNOWN_ID, **values)


def _of_token_lists(bad: Bad) -> Iterator[BadInput]:
    for path in ("prompt.tokens.token_ids", "stop.stop_token_ids", "output_token_ids"):
        for token_id in (VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, UINT32):
            for index in (0, 1, 2):
                ids = [5] * index + [token_id]
                yield bad(INVALID, f"{path}[{index}]", **{path: ids})


def _of_given_output(bad: Bad) -> Iterator[BadInput]:
    for temperature in (0.5, 1.0, 100.0):
        values = {"sampling.temperature": temperature, "output_token_ids": [5]}
        yield bad(INVALID, "sampling.seed", **values)
    for count in (5, 100, 1000):
        yield bad(INVALID, "output_token_ids", output_token_ids=[5] * count)
    for index in (1, 2, 3):
        ids = [5] * (index - 1) + [9, 5]
        yield bad(INVALID, f"output_token_ids[{index}]", output_token_ids=ids, **{"stop.stop_token_ids": [9]})


def _bad_prompts() -> Iterator[tuple[pb.Prompt, str, grpc.StatusCode, str]]:
    text, chat = pb.Prompt(text="hello"), pb.Prompt(chat=pb.ChatPrompt(messages=[_turn("user")]))
    ids = "prompt.tokens.token_ids"
    for model in (MODEL, TEXT_MODEL):
        yield pb.Prompt(), model, INVALID, "prompt"
        yield pb.Prompt(tokens=pb.TokenPrompt()), model, INVALID, ids
        yield pb.Prompt(text=""), model, INVALID, "prompt.text"
        yield pb.Prompt(chat=pb.ChatPrompt()), model, INVALID, "prompt.chat.messages"
    yield text, MODEL, FORBIDDEN, "prompt.text"
    yield chat, MODEL, FORBIDDEN, "prompt.chat"
    for extra in (0, 1, 1000):
        yield pb.Prompt(tokens=pb.TokenPrompt(token_ids=[1] * (CONTEXT_TOKENS + extra))), MODEL, INVALID, ids
    for length in (5000, 100_000):
        yield pb.Prompt(text="x" * length), TEXT_MODEL, INVALID, "prompt.text"
        yield (
            pb.Prompt(chat=pb.ChatPrompt(messages=[_turn("user", "x" * length)])),
            TEXT_MODEL,
            INVALID,
            "prompt.chat",
        )


def _turn(role: str, content: str = "hello") -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content)


# ---------------------------------------------------------------- the other calls of a client


def _of_resume() -> Iterator[BadInput]:
    method = f"{INFERENCE}/ResumeGeneration"
    for name in ("", *STRANGE_NAMES, *(f"id{character}" for character in UNPRINTABLE)):
        yield BadInput(method, pb.ResumeGenerationRequest(request_id=name), MISSING, "request_id")
    for index in (KNOWN_TOKENS + 1, 1000, 2**31, UINT32):
        request = pb.ResumeGenerationRequest(request_id=KNOWN_ID, next_index=index)
        yield BadInput(method, request, INVALID, "next_index")


def harmless_cancels() -> list[pb.CancelGenerationRequest]:
    """What CancelGeneration has to take, since it is idempotent: there is nothing to cancel."""
    names = ("", KNOWN_ID, *STRANGE_NAMES, *(f"id{character}" for character in UNPRINTABLE))
    return [pb.CancelGenerationRequest(request_id=name) for name in names]


def _of_tokenize() -> Iterator[BadInput]:
    method = f"{INFERENCE}/Tokenize"
    good = pb.Prompt(text="hello")
    for name in STRANGE_NAMES:
        yield BadInput(method, pb.TokenizeRequest(model=name, prompt=good), MISSING, "model")
    yield BadInput(method, pb.TokenizeRequest(prompt=good), INVALID, "model")
    yield BadInput(method, pb.TokenizeRequest(model=MODEL, prompt=good), FORBIDDEN, "model")
    ids = "prompt.tokens.token_ids"
    wrong: Sequence[tuple[pb.Prompt, str]] = [
        (pb.Prompt(), "prompt"),
        (pb.Prompt(text=""), "prompt.text"),
        (pb.Prompt(chat=pb.ChatPrompt()), "prompt.chat.messages"),
        (pb.Prompt(tokens=pb.TokenPrompt()), ids),
        (pb.Prompt(tokens=pb.TokenPrompt(token_ids=[0, 256])), f"{ids}[1]"),
        (pb.Prompt(tokens=pb.TokenPrompt(token_ids=[UINT32])), f"{ids}[0]"),
    ]
    for prompt, field in wrong:
        yield BadInput(method, pb.TokenizeRequest(model=TEXT_MODEL, prompt=prompt), INVALID, field)


# ---------------------------------------------------------------- operators


def _of_admin() -> Iterator[BadInput]:
    def bad(name: str, request: Message, code: grpc.StatusCode, field: str) -> BadInput:
        return BadInput(f"{ADMIN}/{name}", request, code, field)

    for name in ("", *STRANGE_NAMES):
        yield bad("DrainWorker", admin_pb2.DrainWorkerRequest(worker=name), MISSING, "worker")
        yield bad("SwapChip", admin_pb2.SwapChipRequest(worker=name), MISSING, "worker")
        yield bad("SubscribeKvEvents", admin_pb2.SubscribeKvEventsRequest(worker=name), MISSING, "worker")
        yield bad("SetGroup", admin_pb2.SetGroupRequest(group=name), MISSING, "group")
        from_it = admin_pb2.SetShadowRequest(source_group=name, shadow_group=GROUP)
        to_it = admin_pb2.SetShadowRequest(source_group=GROUP, shadow_group=name)
        yield bad("SetShadow", from_it, INVALID, "source_group")
        yield bad("SetShadow", to_it, INVALID, "shadow_group")
        policy = admin_pb2.SetGroupRequest(group=GROUP, schedule_policy=name)
        yield bad("SetGroup", policy, INVALID, "schedule_policy")
    for name in STRANGE_NAMES:
        yield bad("FlushCache", admin_pb2.FlushCacheRequest(worker=name), MISSING, "worker")
        yield bad("SetTraffic", admin_pb2.SetTrafficRequest(model=name, weights={GROUP: 1}), INVALID, "model")
        yield bad("SetTraffic", admin_pb2.SetTrafficRequest(weights={GROUP: 1, name: 1}), INVALID, "weights")
    yield from _of_numbers(bad)


def _of_numbers(bad: Callable[[str, Message, grpc.StatusCode, str], BadInput]) -> Iterator[BadInput]:
    for value in (*NOT_NUMBERS, -0.001, -1e300, 0.0):
        yield bad("SetTraffic", admin_pb2.SetTrafficRequest(weights={GROUP: value}), INVALID, "weights")
    yield bad("SetTraffic", admin_pb2.SetTrafficRequest(), INVALID, "weights")
    for value in (*NOT_NUMBERS, -0.001, 1.001, 1e300):
        request = admin_pb2.SetShadowRequest(source_group=GROUP, shadow_group=GROUP, share=value)
        yield bad("SetShadow", request, INVALID, "share")
    same = admin_pb2.SetShadowRequest(source_group=GROUP, shadow_group=GROUP, share=0.5)
    yield bad("SetShadow", same, INVALID, "shadow_group")
    for timeout in (Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=-(2**62))):
        yield bad(
            "DrainWorker", admin_pb2.DrainWorkerRequest(worker=WORKER, timeout=timeout), INVALID, "timeout"
        )
    for timeout in (Duration(seconds=2**62), Duration(seconds=315_576_000_001), Duration(nanos=2_000_000_000),
                    Duration(seconds=1, nanos=-1)):  # fmt: skip
        yield bad(
            "DrainWorker", admin_pb2.DrainWorkerRequest(worker=WORKER, timeout=timeout), INVALID, "timeout"
        )
    for swap in (admin_pb2.SwapChipRequest(worker=WORKER, device=1),
                 admin_pb2.SwapChipRequest(worker=WORKER, backend_options={"a": "b"})):  # fmt: skip
        yield bad("SwapChip", swap, INVALID, "backend")
    for name in STRANGE_NAMES[:1]:
        yield bad("SwapChip", admin_pb2.SwapChipRequest(worker=WORKER, backend=name), FORBIDDEN, "backend")


# ---------------------------------------------------------------- workers


def _registration(**values: Any) -> registry_pb2.RegisterRequest:
    request = registry_pb2.RegisterRequest(
        worker_id="worker-of-nobody", instance_id="of-nobody", executor_address="127.0.0.1:1", group=GROUP,
        model=MODEL, page_count=1, page_size_tokens=16, max_slots=1,
        plugin=plugin_pb2.GetPluginInfoResponse(contract_version="1.0"),
        capabilities=plugin_pb2.CapabilityReport(chip="none"),
    )  # fmt: skip
    return _set(request, **values)


def _of_registry() -> Iterator[BadInput]:
    def bad(code: grpc.StatusCode, field: str, **values: Any) -> BadInput:
        return BadInput(f"{REGISTRY}/Register", _registration(**values), code, field)

    for name in ("worker_id", "instance_id", "executor_address", "group", "model"):
        yield bad(INVALID, name, **{name: ""})
    for name in ("page_count", "page_size_tokens", "max_slots", "chunk_tokens"):
        yield bad(INVALID, name, **{name: 0})
    yield bad(INVALID, "capabilities.chip", **{"capabilities.chip": ""})
    yield bad(INVALID, "plugin.instance_id", **{"plugin.instance_id": "another"})
    for version in ("", "0.9", "2.0", "one", "1" * 1000):
        yield bad(FORBIDDEN, "plugin.contract_version", **{"plugin.contract_version": version})
    for name in STRANGE_NAMES:
        yield bad(INVALID, "model", model=name)
    yield bad(EXISTS, "worker_id", worker_id=WORKER)
    ready = registry_pb2.HeartbeatRequest.EXECUTOR_STATE_READY
    method = f"{REGISTRY}/Heartbeat"
    yield BadInput(method, registry_pb2.HeartbeatRequest(worker_id=WORKER), INVALID, "executor_state")
    for name in ("", WORKER, *STRANGE_NAMES):
        beat = registry_pb2.HeartbeatRequest(worker_id=name, lease_id="no-lease", executor_state=ready)
        yield BadInput(method, beat, MISSING, "lease_id")
