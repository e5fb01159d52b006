"""A client of one gateway, for tests: requests in a line, streams that check themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from gateway.app import GatewayService
from meshkit.errors import MeshError, from_rpc_error
from tests.contract.gateway.fake_scheduler import FakeScheduler, FakeSession


def request_of(
    prompt: str | Sequence[int] | Sequence[tuple[str, str]] = "hello", /, **fields: Any
) -> pb.GenerateRequest:
    """A request: text, token ids or (role, content) pairs; messages in it as such or as dictionaries."""
    request = pb.GenerateRequest(prompt=prompt_of(prompt))
    for name, value in fields.items():
        if isinstance(value, dict):
            getattr(request, name).MergeFrom(type(getattr(request, name))(**value))
        elif isinstance(value, Message):
            getattr(request, name).CopyFrom(value)
        elif name == "output_token_ids":
            request.output_token_ids.extend(value)
        else:
            setattr(request, name, value)
    return request


def prompt_of(prompt: str | Sequence[int] | Sequence[tuple[str, str]]) -> pb.Prompt:
    """The prompt in the form that its type means."""
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    messages = [pb.ChatMessage(role=item[0], content=item[1]) for item in prompt if isinstance(item, tuple)]
    if messages:
        return pb.Prompt(chat=pb.ChatPrompt(messages=messages))
    return pb.Prompt(tokens=pb.TokenPrompt(token_ids=[item for item in prompt if isinstance(item, int)]))


class Stream:
    """One stream as its client sees it; a lost or repeated token, or an event out of order, fails at once."""

    def __init__(self, call: Any, *, next_index: int = 0) -> None:
        self.call = call
        self.accepted: pb.Accepted | None = None
        self.finished: pb.Finished | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.outputs: list[pb.Output] = []
        self._next_index = next_index

    def expect_from(self, next_index: int) -> None:
        """The client has the tokens before `next_index` already."""
        self._next_index = next_index

    async def start(self) -> pb.Accepted:
        """Waits for `accepted`, which comes first."""
        event = await self._read()
        assert event is not None
        assert event.WhichOneof("kind") == "accepted"
        self.accepted = event.accepted
        return event.accepted

    async def output(self) -> pb.Output:
        """Waits for the next output."""
        event = await self._read()
        assert event is not None
        assert event.WhichOneof("kind") == "output", event
        return self._take(event.output)

    async def until_text(self, length: int) -> None:
        """Reads until there are `length` characters."""
        while len(self.text) < length:
            await self.output()

    async def end(self) -> pb.Finished:
        """Reads to the end."""
        if self.accepted is None:
            await self.start()
        while (event := await self._read()) is not None:
            assert self.finished is None, "an event after the end"
            if event.WhichOneof("kind") == "finished":
                self.finished = event.finished
            else:
                self._take(event.output)
        assert self.finished is not None, "the stream ended without `finished`"
        return self.finished

    async def error(self) -> MeshError:
        """Reads to the end, which has to be an error."""
        try:
            await self.end()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        raise AssertionError(f"no error, but {self.finished}")

    async def _read(self) -> pb.GenerationEvent | None:
        response = await self.call.read()
        return None if response is grpc.aio.EOF else response.event

    def _take(self, output: pb.Output) -> pb.Output:
        assert output.first_index == self._next_index, "a token was lost or repeated"
        assert output.token_ids or output.text, "an empty output"
        self._next_index += len(output.token_ids)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.text += output.text
        self.outputs.append(output)
        return output


@dataclass
class Mesh:
    """A gateway with a fake scheduler and a client. key: what the client sends, None for none."""

    scheduler: FakeScheduler
    gateway: GatewayService
    address: str
    http_address: str
    channel: grpc.aio.Channel
    key: str | None = None
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def with_key(self, key: str | None) -> Mesh:
        """The same with a client of that key."""
        return replace(self, key=key)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What goes with each call."""
        return [] if self.key is None else [("authorization", f"Bearer {self.key}")]

    async def session(self) -> FakeSession:
        """The gateway's next session, once the gateway serves."""
        session = await self.scheduler.session()
        await self.gateway.wait_serving()
        return session

    def generate(self, *args: Any, timeout: float | None = 20.0, **fields: Any) -> Stream:
        """Start a generation."""
        request = request_of(*args, **fields)
        return Stream(self.stub.Generate(request, timeout=timeout, metadata=self.metadata))

    def resume(self, request_id: str, next_index: int) -> Stream:
        """Resume a generation."""
        request = pb.ResumeGenerationRequest(request_id=request_id, next_index=next_index)
        call = self.stub.ResumeGeneration(request, timeout=20, metadata=self.metadata)
        return Stream(call, next_index=next_index)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a generation; whether it was live."""
        request = pb.CancelGenerationRequest(request_id=request_id)
        response = await self.stub.CancelGeneration(request, metadata=self.metadata)
        return bool(response.cancelled)

    async def tokenize(self, *args: Any, model: str = "") -> list[int]:
        """What Tokenize answers."""
        request = pb.TokenizeRequest(model=model, prompt=prompt_of(*args))
        return list((await self.stub.Tokenize(request, metadata=self.metadata)).token_ids)


MeshFactory = Callable[..., Any]
