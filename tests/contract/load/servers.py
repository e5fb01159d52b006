"""Real servers in this process: an InferenceService of generated code, and OpenAI's HTTP on uvicorn.

Both send what a script says, each message a known virtual time after the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import orjson
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.http.observability import HealthReport, ObservabilityServer
from meshkit.rpc.keepalive import DEFAULT_MAX_MESSAGE_BYTES, server_options
from tests.contract.load.clock import ServedTime


@dataclass(frozen=True)
class Message:
    """after_s: virtual seconds since the message before, or since the request came."""

    after_s: float
    token_ids: tuple[int, ...]


@dataclass
class Script:
    """What a server does with each request, and what it saw.

    held_until: no request is answered before so many were there at once.
    """

    messages: Sequence[Message] = ()
    cached_tokens: int = 0
    hang: bool = False
    cut: bool = False
    seen: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    held_until: int = 0
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts live requests."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.at_once >= self.held_until:
            self.enough.set()
        try:
            yield
        finally:
            self.at_once -= 1
            if not self.at_once:
                self.ended.set()

    async def play(self, time: ServedTime | None) -> AsyncIterator[Message]:
        """The messages in their time; hangs after them where told to."""
        await self.enough.wait()
        stamps = time.stamps if time is not None else 0
        for message in self.messages:
            if time is not None:
                await time.pass_by(message.after_s, after_stamp=stamps)
                stamps += 1
            yield message
            await asyncio.sleep(0)
        if time is not None:
            await time.pass_by(0.0, after_stamp=stamps)
        if self.hang:
            self.hanging.set()
            await asyncio.Event().wait()


class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """One model, `script` for each Generate."""

    def __init__(self, script: Script, time: ServedTime | None) -> None:
        self._script = script
        self._time = time
        self.error: tuple[grpc.StatusCode, str] | None = None

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(name="scripted", context_tokens=4096, vocab_size=500)
        return inference_pb2.ListModelsResponse(models=[model])

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        script = self._script
        script.seen.append(request)
        script.headers.append(dict(context.invocation_metadata()))
        if self.error is not None:
            await context.abort(*self.error)
        with script.one_more():
            yield _event(accepted=inference_pb2.Accepted(request_id="r"))
            count = 0
            async for message in script.play(self._time):
                yield _event(
                    output=inference_pb2.Output(
                        first_index=count, token_ids=message.token_ids, text="x" * len(message.token_ids)
                    )
                )
                count += len(message.token_ids)
            if not script.cut:
                usage = inference_pb2.Usage(
                    prompt_tokens=len(request.prompt.tokens.token_ids),
                    completion_tokens=count,
                    cached_tokens=script.cached_tokens,
                )
                yield _event(
                    finished=inference_pb2.Finished(reason=inference_pb2.Finished.REASON_LENGTH, usage=usage)
                )

    def unused(self, request: Any, context: Any) -> Any:
        """RPCs that the load generator never calls."""
        raise NotImplementedError

    ResumeGeneration = CancelGeneration = Tokenize = unused


def _event(**kind: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(event=inference_pb2.GenerationEvent(**kind))


@contextlib.asynccontextmanager
async def serve_grpc(
    script: Script, time: ServedTime | None = None, *, key_and_certificate: tuple[bytes, bytes] | None = None
) -> AsyncIterator[tuple[str, ScriptedInference]]:
    """Yields the address and the servicer. In plain text unless there is a key and its certificate."""
    server = grpc.aio.server(options=server_options(DEFAULT_MAX_MESSAGE_BYTES))
    servicer = ScriptedInference(script, time)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    if key_and_certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = grpc.ssl_server_credentials([key_and_certificate])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)


@dataclass
class OpenAiManners:
    """How a server of OpenAI's interface differs from the next one.

    tell_ids: vLLM's return_token_ids. running_usage: continuous_usage_stats. timings: llama.cpp's cache_n.
    tell_vocabulary: in /v1/models, as llama.cpp. status: refuse every request with this one.
    """

    tell_ids: bool = False
    running_usage: bool = False
    timings: bool = False
    status: int = 200
    error_in_stream: str = ""
    tell_vocabulary: bool = True


class ScriptedOpenAi:
    """/v1/models, /v1/completions and /v1/chat/completions."""

    def __init__(self, script: Script, manners: OpenAiManners, time: ServedTime | None) -> None:
        self._script = script
        self._manners = manners
        self._time = time

    @property
    def routes(self) -> list[Route]:
        """For starlette."""
        return [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]

    async def _models(self, _: Request) -> Response:
        meta = {"meta": {"n_vocab": 500}} if self._manners.tell_vocabulary else {}
        return JSONResponse({"data": [{"id": "scripted", **meta}]})

    async def _complete(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self._script.seen.append((request.url.path, body))
        self._script.headers.append(dict(request.headers))
        if self._manners.status != 200:
            return JSONResponse({"error": {"message": "no room"}}, status_code=self._manners.status)
        chat = request.url.path.endswith("chat/completions")
        return StreamingResponse(self._chunks(body, chat=chat), media_type="text/event-stream")

    async def _chunks(self, body: dict[str, Any], *, chat: bool) -> AsyncIterator[bytes]:
        script, manners, count = self._script, self._manners, 0
        prompt_tokens = len(body.get("prompt") or "") or 7
        with script.one_more():
            if chat:
                yield _sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            async for message in script.play(self._time):
                count += len(message.token_ids)
                choice = _choice("x" * len(message.token_ids), chat=chat)
                if manners.tell_ids:
                    choice["token_ids"] = list(message.token_ids)
                chunk: dict[str, Any] = {"choices": [choice]}
                if manners.running_usage:
                    chunk["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
                yield _sse(chunk)
            if manners.error_in_stream:
                yield _sse({"error": {"message": manners.error_in_stream}})
            elif not script.cut:
                yield _sse({"choices": [{**_choice("", chat=chat), "finish_reason": "length"}]})
                yield _sse({"choices": [], **self._last_words(prompt_tokens, count)})
                yield b"data: [DONE]\n\n"

    def _last_words(self, prompt_tokens: int, count: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
        if self._manners.timings:
            return {"usage": usage, "timings": {"cache_n": self._script.cached_tokens}}
        return {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": self._script.cached_tokens}}}


def _choice(text: str, *, chat: bool) -> dict[str, Any]:
    return {"delta": {"content": text}} if chat else {"text": text}


def _sse(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


@contextlib.asynccontextmanager
async def serve_openai(
    script: Script, manners: OpenAiManners | None = None, time: ServedTime | None = None
) -> AsyncIterator[str]:
    """Yields the base URL."""
    scripted = ScriptedOpenAi(script, manners or OpenAiManners(), time)
    server = ObservabilityServer(
        "127.0.0.1:0",
        CollectorRegistry(),
        lambda: HealthReport(serving=True),
        routes=scripted.routes,
        stop_grace_s=0,
    )
    address = await server.start()
    try:
        yield f"http://{address}"
    finally:
        await server.stop()
