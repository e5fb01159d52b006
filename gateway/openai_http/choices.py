"""The generations of one call: started together, read together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.generation import Extension, Generations
from gateway.generation_spec import Finish, FinishReason, GenerationSpec
from gateway.live_request import Output, OutputReader
from gateway.openai_http.bodies import MAX_CHOICES
from gateway.openai_http.constraining import Constrain
from gateway.prompts import Conversation
from gateway.tenant import Tenant
from meshkit.errors import Cancelled, Internal, InvalidArgument


@dataclass(frozen=True)
class Wanted:
    """What one call asks for: `count` choices of each prompt.

    request: all but prompts and ids. name: what the ids of its generations begin with. time_left_s: to the
    caller's deadline; None: there is none. constrain: see `Extension`.
    """

    request: pb.GenerateRequest
    prompts: Sequence[pb.Prompt | Conversation]
    count: int
    name: str
    tenant: Tenant
    shown_tokens: tuple[str, ...] = ()
    constrain: Constrain | None = None
    time_left_s: float | None = None


def choice_id(name: str, number: int) -> str:
    """Id of the generation that is choice `number` of the call `name`."""
    return f"{name}-{number}"


async def open_choices(stack: AsyncExitStack, generations: Generations, wanted: Wanted) -> list[OutputReader]:
    """Readers of all choices, those of one prompt after the other; the mesh has accepted them all.

    Each is a generation of its own for every budget. They end with `stack`, where they did not before: also
    when one of them is refused here.

    Raises:
        MeshError: as `Generations.generate`; or InvalidArgument, more choices than one call may have.
    """
    if len(wanted.prompts) * wanted.count > MAX_CHOICES:
        raise InvalidArgument(
            f"n is {wanted.count} for each of {len(wanted.prompts)} prompts; at most {MAX_CHOICES} choices "
            "in all are allowed in one call",
            field="n",
        )
    readers: list[OutputReader] = []
    for prompt in wanted.prompts:
        first: GenerationSpec | None = None
        for choice in range(wanted.count):
            request, extension = _generation(wanted, prompt, choice, first, number=len(readers))
            reader = await stack.enter_async_context(
                generations.generate(
                    request, tenant=wanted.tenant, time_left_s=wanted.time_left_s, extension=extension
                )
            )
            first = first or reader.request.spec
            readers.append(reader)
    return readers


def _generation(
    wanted: Wanted,
    prompt: pb.Prompt | Conversation,
    choice: int,
    first: GenerationSpec | None,
    *,
    number: int,
) -> tuple[pb.GenerateRequest, Extension]:
    """One choice. Those after the first have its tokens and its seed: nothing is tokenised or drawn twice."""
    request = pb.GenerateRequest()
    request.CopyFrom(wanted.request)
    request.request_id = choice_id(wanted.name, number)
    conversation = None
    if first is not None:
        request.prompt.tokens.token_ids.extend(first.prompt_token_ids)
        request.sampling.seed = first.sampling.seed
    elif isinstance(prompt, Conversation):
        conversation = prompt
    else:
        request.prompt.CopyFrom(prompt)
    return request, Extension(
        conversation=conversation,
        choice=choice,
        shown_tokens=wanted.shown_tokens,
        constrain=wanted.constrain,
    )


async def first_news(readers: Sequence[OutputReader]) -> None:
    """Return when one of them has something to read, or has ended well.

    Raises:
        MeshError: one of them failed before that.
    """
    waiting = [asyncio.ensure_future(reader.wait_readable()) for reader in readers]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def read_all(readers: Sequence[OutputReader]) -> AsyncGenerator[tuple[int, Output | None], None]:
    """(index of the reader, its next output) in the order in which they come; None once for the end of each.

    Raises:
        MeshError: one of them failed, or was cancelled.
    """
    if len(readers) == 1:
        while (output := await _next(readers[0])) is not None:
            yield 0, output
        yield 0, None
        return
    waiting = {asyncio.ensure_future(_next(reader)): index for index, reader in enumerate(readers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                output, index = task.result(), waiting.pop(task)
                yield index, output
                if output is not None:
                    waiting[asyncio.ensure_future(_next(readers[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def end_of(reader: OutputReader) -> Finish:
    """How a generation that was read to its end has ended."""
    end = reader.request.end
    if not isinstance(end, Finish):
        raise Internal("a reader came to the end of a request that has not ended well")
    return end


async def _next(reader: OutputReader) -> Output | None:
    try:
        return await reader.__anext__()
    except StopAsyncIteration:
        if end_of(reader).reason is FinishReason.CANCELLED:
            raise Cancelled(
                "this generation was cancelled by its id", reason="GENERATION_CANCELLED"
            ) from None
        return None
