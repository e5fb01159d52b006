"""Generations to a router's messages: chunks of new tokens, and the end of each choice."""

from __future__ import annotations

from collections.abc import Sequence

from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from gateway.generation_spec import Finish, FinishReason
from gateway.live_request import LiveRequest, Output

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


def chunk_of(request_id: str, index: int, live: LiveRequest, output: Output) -> sgl.GenerateResponse:
    """New tokens of choice `index`. Counts are of all so far."""
    chunk = sgl.GenerateStreamChunk(
        token_ids=output.token_ids,
        prompt_tokens=len(live.spec.prompt_token_ids),
        completion_tokens=output.first_index + len(output.token_ids),
        cached_tokens=live.cached_tokens or 0,
        output_logprobs=_logprobs(live, output.token_ids, output.logprobs),
        index=index,
    )
    return sgl.GenerateResponse(request_id=request_id, chunk=chunk)


def complete_of(request_id: str, index: int, live: LiveRequest, end: Finish) -> sgl.GenerateResponse:
    """The end of choice `index`, with all of its tokens: the one that ended it, too."""
    complete = sgl.GenerateComplete(
        output_ids=live.token_ids,
        finish_reason=_REASONS[end.reason],
        prompt_tokens=len(live.spec.prompt_token_ids),
        completion_tokens=len(live.token_ids),
        cached_tokens=live.cached_tokens or 0,
        output_logprobs=_logprobs(live, live.token_ids, live.logprobs),
        index=index,
    )
    if end.matched_stop:
        complete.matched_stop_str = end.matched_stop
    elif end.reason is FinishReason.STOP and live.token_ids:
        complete.matched_token_id = live.token_ids[-1]
    return sgl.GenerateResponse(request_id=request_id, complete=complete)


def _logprobs(
    live: LiveRequest, token_ids: Sequence[int], logprobs: Sequence[float]
) -> sgl.OutputLogProbs | None:
    if not live.spec.logprobs:
        return None
    return sgl.OutputLogProbs(token_logprobs=logprobs, token_ids=token_ids)
