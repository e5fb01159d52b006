"""One generation: the request built from flags, the stream followed to its end, over gateways if need be."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator

import grpc.aio
from google.protobuf.message import Message

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.cli.gateway_channel import key_metadata, open_gateway
from meshkit.cli.gateway_tries import GatewayTries, read_gateways
from meshkit.cli.terminal import one_line
from meshkit.config import FrozenConfig
from meshkit.errors import Internal, InvalidArgument, MeshError, Unavailable, from_rpc_error

UNREACHED = "UNAVAILABLE"


class GenerationOptions(FrozenConfig):
    """The flags of `generate`; None leaves the choice to the gateway, which checks all values."""

    prompt: str
    model: str = ""
    raw: bool = False
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


def build_request(options: GenerationOptions) -> inference_pb2.GenerateRequest:
    """The request.

    Raises:
        InvalidArgument: a value that the wire cannot carry (too large an integer, a lone surrogate), by
            field; or a system text beside --raw, which knows no roles.
    """
    request = inference_pb2.GenerateRequest()
    _assign(request, "model", options.model)
    _fill_prompt(request.prompt, options)
    for field in ("temperature", "top_k", "top_p", "min_p", "seed"):
        _assign(request.sampling, field, getattr(options, field))
    _assign(request.stop, "max_tokens", options.max_tokens)
    for text in options.stop:
        with _carriable("stop", text):
            request.stop.stop_strings.append(text)
    return request


def _fill_prompt(prompt: inference_pb2.Prompt, options: GenerationOptions) -> None:
    if options.raw:
        if options.system is not None:
            raise InvalidArgument(
                "system: --raw sends the text as it is, without roles; leave one out", field="system"
            )
        _assign(prompt, "text", options.prompt, name="prompt")
        return
    for role, content, name in (("system", options.system, "system"), ("user", options.prompt, "prompt")):
        if content is not None:
            _assign(prompt.chat.messages.add(role=role), "content", content, name=name)


def _assign(message: Message, field: str, value: object, *, name: str | None = None) -> None:
    """Sets `field` unless `value` is None; `name` is what errors call it, by default the field."""
    if value is not None:
        with _carriable(name or field, value):
            setattr(message, field, value)


@contextlib.contextmanager
def _carriable(name: str, value: object) -> Iterator[None]:
    """Protobuf's own errors about types and ranges, as ours."""
    try:
        yield
    except (ValueError, TypeError) as error:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
        raise InvalidArgument(
            f"{name} is {shown}, which a request cannot carry: {error}", field=name
        ) from error


class GenerationResult(FrozenConfig):
    """A finished generation. token_ids include the end token; text leaves special tokens out."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: str
    request_id: str
    model: str
    usage: dict[str, int]
    group: str
    worker: str
    chip: str


def _tell(sentence: str) -> None:
    print(f"chipmesh: {one_line(sentence)}", file=sys.stderr, flush=True)


async def generate(
    request: inference_pb2.GenerateRequest,
    *,
    endpoint: str,
    timeout_s: float | None,
    on_text: Callable[[str], None],
    on_retry: Callable[[str], None] = _tell,
) -> GenerationResult:
    """Streams one generation; `on_text` gets each piece of text as it comes.

    endpoint: address of a gateway, or of several with commas between them. They are asked in turn: until one
        has accepted, each once; from then on the request is sent again, with the tokens that came, whenever
        its gateway is lost, MOST_TRIES times at most. on_retry gets a sentence about it each time.
    timeout_s: until the answer must be whole, all tries together.
    The key of CHIPMESH_API_KEY goes with it; see gateway_channel.

    Raises:
        MeshError: what the last gateway answered, or Unavailable where none is there.
    """
    tries = GatewayTries(read_gateways(endpoint), timeout_s=timeout_s)
    collected = _Collected()
    while True:
        try:
            await _follow(collected.rest_of(request), collected, tries.gateway, tries.time_left_s, on_text)
            return collected.result()
        except MeshError as error:
            pause_s = tries.pause_after(error, accepted=collected.is_accepted)
            if pause_s is None:
                raise
            on_retry(tries.describe(error, token_count=collected.token_count))
        await asyncio.sleep(pause_s)


async def _follow(
    request: inference_pb2.GenerateRequest,
    collected: _Collected,
    address: str,
    timeout_s: float | None,
    on_text: Callable[[str], None],
) -> None:
    async with open_gateway(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with translated_errors(address, service="gateway"):
            async for response in stub.Generate(request, timeout=timeout_s, metadata=key_metadata()):
                piece = collected.take(response.event)
                if piece:
                    on_text(piece)


class _Collected:
    """The events of one generation, put together over all streams that carried it."""

    def __init__(self) -> None:
        self._accepted = inference_pb2.Accepted()
        self._finished: inference_pb2.Finished | None = None
        self._text: list[str] = []
        self._last_text = ""
        self._token_ids: list[int] = []

    @property
    def is_accepted(self) -> bool:
        """Whether a gateway has taken it."""
        return bool(self._accepted.request_id)

    @property
    def token_count(self) -> int:
        """Tokens that came."""
        return len(self._token_ids)

    def rest_of(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
        """What to send so that the generation goes on after what came: by its id, with its seed."""
        self._last_text = ""
        if not self.is_accepted:
            return request
        rest = inference_pb2.GenerateRequest()
        rest.CopyFrom(request)
        rest.request_id = self._accepted.request_id
        rest.sampling.CopyFrom(self._accepted.effective_sampling)
        rest.output_token_ids[:] = self._token_ids
        return rest

    def take(self, event: inference_pb2.GenerationEvent) -> str:
        """Keeps the event; returns the text that is certain now.

        Text without tokens is certain with `finished`: if that is lost, both come again.
        """
        kind = event.WhichOneof("kind")
        if kind == "accepted":
            self._accepted = event.accepted
        elif kind == "finished":
            self._finished = event.finished
            return self._add_text()
        elif kind == "output":
            self._token_ids.extend(event.output.token_ids)
            self._last_text += event.output.text
            if event.output.token_ids:
                return self._add_text()
        return ""

    def _add_text(self) -> str:
        piece, self._last_text = self._last_text, ""
        self._text.append(piece)
        return piece

    def result(self) -> GenerationResult:
        """Raises Internal where the stream ended without its last event."""
        finished = self._finished
        if finished is None:
            raise Internal("the stream ended without saying why; see the gateway's log")
        usage = finished.usage
        return GenerationResult(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            prompt_token_ids=tuple(self._accepted.prompt_token_ids),
            finish_reason=_reason_name(finished.reason),
            matched_stop=finished.matched_stop,
            request_id=self._accepted.request_id,
            model=self._accepted.model,
            usage={
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            group=finished.placement.group,
            worker=finished.placement.worker,
            chip=finished.placement.chip,
        )


def _reason_name(reason: inference_pb2.Finished.Reason.ValueType) -> str:
    """REASON_STOP as "stop"."""
    return inference_pb2.Finished.Reason.Name(reason).removeprefix("REASON_").lower()


@contextlib.contextmanager
def translated_errors(endpoint: str, *, service: str) -> Iterator[None]:
    """gRPC's errors as ours; a peer that is not there is told with its address and the way out."""
    try:
        yield
    except grpc.aio.AioRpcError as rpc_error:
        error: MeshError = from_rpc_error(rpc_error)
        if error.code is grpc.StatusCode.UNAVAILABLE and error.reason == UNREACHED:
            raise Unavailable(
                f"no {service} answers at {endpoint} ({error.message}); `chipmesh status` shows what is up, "
                "`chipmesh up` starts a mesh"
            ) from rpc_error
        raise error from rpc_error
