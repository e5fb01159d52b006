"""Models on the wire: the request to load one as a runner reads it, what a runner says of it as a message."""

from __future__ import annotations

from chipmesh.device.v1alpha1.execution_pb2 import LoadedModel as LoadedModelMessage
from chipmesh.device.v1alpha1.execution_pb2 import LoadModelRequest, ParallelPlace
from chipmesh.device.v1alpha1.execution_pb2 import OperatorDecision as OperatorDecisionMessage
from meshkit.errors import InvalidArgument
from meshkit.modelstore.sharding import ParallelLayout
from plugins.sdk.runner import LoadedModel, LoadOptions, OperatorDecision, ParallelOptions


def model_message(model: LoadedModel) -> LoadedModelMessage:
    """The wire form of a loaded model."""
    return LoadedModelMessage(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        context_tokens=model.context_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
        weight_bytes=model.weight_bytes,
        weights_version=model.weights_version,
        numeric_class=model.numeric_class,
        kv_cache_dtype=model.kv_cache_dtype,
        kv_layout=model.kv_layout,
        eos_token_ids=model.eos_token_ids,
        operators=[_decision_message(decision) for decision in model.operators],
    )


def _decision_message(decision: OperatorDecision) -> OperatorDecisionMessage:
    return OperatorDecisionMessage(
        name=decision.name,
        choice=decision.choice,
        reason=decision.reason,
        where=decision.where,
        calls=decision.calls,
        sizes=decision.sizes,
        padded=decision.padded,
        parts=[_decision_message(part) for part in decision.parts],
    )


def load_options(request: LoadModelRequest) -> LoadOptions:
    """A request as a runner reads it.

    Raises:
        InvalidArgument: a place in a set that cannot be.
    """
    return LoadOptions(
        model_path=request.model_path,
        load_format=request.load_format or "auto",
        dtype=request.dtype or "auto",
        kv_cache_dtype=request.kv_cache_dtype or "auto",
        device=request.device,
        strict=request.strict,
        cache_dir=request.cache_dir,
        quantization=request.quantization,
        parallel=_parallel_options(request.parallel) if request.HasField("parallel") else None,
    )


def _parallel_options(place: ParallelPlace) -> ParallelOptions:
    ParallelLayout(place.tensor_parallel_size, place.pipeline_parallel_size).place(place.rank)
    for field in ("join_timeout", "step_timeout"):
        if getattr(place, field).ToNanoseconds() <= 0:
            raise InvalidArgument(f"parallel.{field} has to be longer than 0 s", field=f"parallel.{field}")
    return ParallelOptions(
        rank=place.rank,
        tensor=place.tensor_parallel_size,
        pipeline=place.pipeline_parallel_size,
        rendezvous=place.rendezvous,
        join_timeout_s=place.join_timeout.ToNanoseconds() / 1e9,
        step_timeout_s=place.step_timeout.ToNanoseconds() / 1e9,
    )
