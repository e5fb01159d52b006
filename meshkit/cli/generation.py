"""One generation at a gateway: the request built from flags, the stream followed to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import grpc.aio
from google.protobuf.message import Message

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.config import FrozenConfig
from meshkit.errors import Internal, InvalidArgument, MeshError, Unavailable, from_rpc_error
from meshkit.rpc.channel import open_channel

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


async def generate(
    request: inference_pb2.GenerateRequest,
    *,
    endpoint: str,
    timeout_s: float | None,
    on_text: Callable[[str], None],
) -> GenerationResult:
    """Streams one generation from the gateway at `endpoint`; `on_text` gets each piece of text as it comes.

    Raises:
        MeshError: what the gateway answered, or Unavailable where none is there.
    """
    async with open_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with translated_errors(endpoint, service="gateway"):
            collected = _Collected()
            async for response in stub.Generate(request, timeout=timeout_s):
                piece = collected.take(response.event)
                if piece:
                    on_text(piece)
            return collected.result()


class _Collected:
    """The events of one stream, put together."""

    def __init__(self) -> None:
        self._accepted = inference_pb2.Accepted()
        self._finished: inference_pb2.Finished | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []

    def take(self, event: inference_pb2.GenerationEvent) -> str:
        """Keeps the event; returns its text."""
        kind = event.WhichOneof("kind")
        if kind == "accepted":
            self._accepted = event.accepted
        elif kind == "finished":
            self._finished = event.finished
        elif kind == "output":
            self._token_ids.extend(event.output.token_ids)
            self._text.append(event.output.text)
            return event.output.text
        return ""

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
