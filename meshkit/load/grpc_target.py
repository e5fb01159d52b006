"""Our own gateway as a target, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.errors import Cancelled, InvalidArgument, Unavailable, from_rpc_error
from meshkit.load.request import LoadRequest
from meshkit.load.targets import Received, ServedModel, Usage, choose_model
from meshkit.rpc.keepalive import DEFAULT_MAX_MESSAGE_BYTES, Keepalive, client_options

WELL_KNOWN = "system"
"""Instead of a file: the authorities that grpc trusts by itself."""
PATIENT = Keepalive(interval_ms=10_000, ping_timeout_ms=30_000)
"""A machine under full load answers a ping late, and that is a figure, no failure."""


class GrpcTarget:
    """`InferenceService` at one address, over one connection. Use it as `async with`.

    address: "HOST:PORT". model: "" where only one is served. temperature: 0 is greedy.
    ignore_eos: go on past end tokens, so that each request makes exactly its max_tokens.
    api_key: sent with each call. trace: makes the traceparent of a call, "" for none.
    authority: PEM file of who signed the gateway's certificate, or "system"; None: plain text.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        temperature: float = 0.0,
        ignore_eos: bool = True,
        api_key: str | None = None,
        authority: str | None = None,
        trace: Callable[[], str] = lambda: "",
    ) -> None:
        self._address = address
        self._model = model
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._authority = authority
        self._trace = trace
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    def __repr__(self) -> str:
        return f"<GrpcTarget {self._address} model={self._model!r}>"

    async def __aenter__(self) -> GrpcTarget:
        """Raises InvalidArgument where the authority's file cannot be read."""
        self._channel = await _open(self._address, self._authority)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def choose_model(self) -> ServedModel:
        """See `Target.choose_model`."""
        try:
            listed = await self._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        models = [ServedModel(model.name, model.vocab_size or None) for model in listed.models]
        chosen = choose_model(models, name=self._model, server=self._address)
        self._model = chosen.name
        return chosen

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Received, None]:
        """See `Target.stream`."""
        traceparent = self._trace()
        metadata = (*self._metadata, ("traceparent", traceparent)) if traceparent else self._metadata
        call = self._stub.Generate(self._wire_form(request), metadata=metadata)
        finished = False
        try:
            async for response in call:
                event = response.event
                kind = event.WhichOneof("kind")
                if kind == "output":
                    token_ids = tuple(event.output.token_ids)
                    yield Received(len(token_ids), token_ids, event.output.text, None)
                elif kind == "finished":
                    finished = True
                    yield _last(event.finished)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        if not finished:
            raise Unavailable("the stream ended without `finished`", reason="STREAM_CUT")

    def _wire_form(self, request: LoadRequest) -> inference_pb2.GenerateRequest:
        wire = inference_pb2.GenerateRequest(model=self._model)
        wire.sampling.temperature = self._temperature
        wire.stop.max_tokens = request.max_tokens
        wire.stop.ignore_eos = self._ignore_eos
        if request.token_ids is not None:
            wire.prompt.tokens.token_ids.extend(request.token_ids)
        elif request.text is not None:
            wire.prompt.text = request.text
        for turn in request.messages or ():
            wire.prompt.chat.messages.add(role=turn.role, content=turn.content)
        return wire


def _last(finished: inference_pb2.Finished) -> Received:
    if finished.reason == inference_pb2.Finished.REASON_CANCELLED:
        raise Cancelled("the server cancelled the request")
    usage = finished.usage
    return Received(0, (), "", Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens))


async def _open(address: str, authority: str | None) -> grpc.aio.Channel:
    """Without interceptors: these cost a queue and a task a message, and here the client must be cheap."""
    options = client_options(DEFAULT_MAX_MESSAGE_BYTES, PATIENT)
    if authority is None:
        return grpc.aio.insecure_channel(address, options=options)
    roots = None if authority == WELL_KNOWN else await asyncio.to_thread(_read, authority)
    return grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(root_certificates=roots), options=options
    )


def _read(authority: str) -> bytes:
    try:
        return Path(authority).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"authority: {authority} cannot be read: {error.strerror}; name a PEM file, or say "
            f"{WELL_KNOWN!r}",
            field="authority",
        ) from error
