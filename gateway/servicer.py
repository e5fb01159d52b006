"""InferenceService: translation between its messages and the gateway's own types, and nothing else."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from gateway.generation import Generations
from gateway.generation_spec import Finish, FinishReason, GenerationSpec, Sampling
from gateway.key_interceptor import current_tenant
from gateway.live_request import LiveRequest, Output, OutputReader
from meshkit.errors import Internal
from meshkit.telemetry.tracing import inject_traceparent

if TYPE_CHECKING:
    from meshkit.rpc.handlers import Context

SERVICE_NAME = "chipmesh.inference.v1alpha1.InferenceService"

_REASONS = {
    FinishReason.STOP: pb.Finished.REASON_STOP,
    FinishReason.LENGTH: pb.Finished.REASON_LENGTH,
    FinishReason.CANCELLED: pb.Finished.REASON_CANCELLED,
}


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """What clients call. Errors are `MeshError`s, which the server's interceptor turns into statuses."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def Generate(  # type: ignore[override]  # a coroutine that writes to the context
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """See the proto."""
        following = self._generations.generate(
            request, tenant=current_tenant(), time_left_s=context.time_remaining()
        )
        async with following as reader:
            await _tell_trace(context)
            await _write_all(reader, context, pb.GenerateResponse)

    async def ResumeGeneration(  # type: ignore[override]  # as Generate
        self, request: pb.ResumeGenerationRequest, context: Context
    ) -> None:
        """See the proto. `accepted` comes first here, too: the client may have lost it."""
        following = self._generations.resume(
            request.request_id, tenant=current_tenant(), next_index=request.next_index
        )
        async with following as reader:
            await _tell_trace(context)
            await _write_all(reader, context, pb.ResumeGenerationResponse)

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: Context
    ) -> pb.CancelGenerationResponse:
        """See the proto."""
        cancelled = self._generations.cancel(request.request_id, tenant=current_tenant())
        return pb.CancelGenerationResponse(cancelled=cancelled)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """See the proto."""
        return pb.ListModelsResponse(
            models=[
                pb.Model(name=model.name, context_tokens=model.context_tokens, vocab_size=model.vocab_size)
                for model in self._generations.models
            ]
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """See the proto."""
        model = self._generations.models.find(request.model)
        model.require_text("model")
        current_tenant().take_request()
        token_ids = await self._generations.prompts.read(request.prompt, model)
        return pb.TokenizeResponse(token_ids=token_ids)


async def _tell_trace(context: Context) -> None:
    """Say in the initial metadata by which trace the call is kept, if it is. Once it is accepted, not before:
    a refusal without them is one that a client's channel may try again by itself.
    """
    if traceparent := inject_traceparent():
        await context.send_initial_metadata((("traceparent", traceparent),))


async def _write_all(
    reader: OutputReader,
    context: Context,
    response: type[pb.GenerateResponse] | type[pb.ResumeGenerationResponse],
) -> None:
    request = reader.request
    await context.write(response(event=pb.GenerationEvent(accepted=_accepted(request.spec))))
    async for output in reader:
        message = response()
        fill_output(message.event.output, output)
        await context.write(message)
    await context.write(response(event=pb.GenerationEvent(finished=_finished(request))))


def _accepted(spec: GenerationSpec) -> pb.Accepted:
    stop = spec.stop
    return pb.Accepted(
        request_id=spec.request_id,
        model=spec.model,
        effective_sampling=_sampling_options(spec.sampling),
        effective_stop=pb.StopOptions(
            max_tokens=stop.max_tokens,
            stop_strings=stop.stop_strings,
            stop_token_ids=stop.stop_token_ids,
            ignore_eos=stop.ignore_eos,
            min_tokens=stop.min_tokens,
        ),
        prompt_token_ids=spec.prompt_token_ids,
    )


def _sampling_options(sampling: Sampling) -> pb.SamplingOptions:
    options = pb.SamplingOptions(**sampling.numbers)
    if sampling.constraint is not None:
        setattr(options.constraint, sampling.constraint.kind, sampling.constraint.text)
    return options


def fill_output(message: pb.Output, output: Output) -> None:
    """In place: made by keywords, each level is copied into the next, which costs twice as much."""
    message.first_index = output.first_index
    message.token_ids.extend(output.token_ids)
    message.text = output.text
    if output.logprobs:
        message.logprobs.extend(output.logprobs)


def _finished(request: LiveRequest) -> pb.Finished:
    end = request.end
    if not isinstance(end, Finish):
        raise Internal("a reader came to the end of a request that has not ended well")
    return pb.Finished(
        reason=_REASONS[end.reason],
        matched_stop=end.matched_stop,
        usage=pb.Usage(
            prompt_tokens=len(request.spec.prompt_token_ids),
            completion_tokens=len(request.token_ids),
            cached_tokens=request.cached_tokens or 0,
        ),
        placement=pb.Placement(**asdict(request.placement)),
    )
