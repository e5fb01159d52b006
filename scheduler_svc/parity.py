"""The parity gate: a replica of another numeric class answers golden prompts before it takes traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from chipmesh.device.v1alpha1 import sampling_pb2
from meshkit.errors import MeshError
from scheduler_svc.config import ParityConfig
from scheduler_svc.core.structures import FinishReason
from scheduler_svc.engine import Engine
from scheduler_svc.live_request import LiveRequest, ReplicaInfo


@dataclass
class _Answer:
    """Greedy tokens of one prompt on one replica. An EventSink."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: MeshError | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def queued(self, live: LiveRequest) -> None:
        """Nobody waits for it."""

    def placed(self, number: int, info: ReplicaInfo, *, cached_tokens: int) -> None:
        """Nobody waits for it."""

    def grew(self, live: LiveRequest) -> None:
        """More of the answer."""
        self.token_ids.append(live.core.output[-1])
        self.logprobs = live.logprobs

    def finished(self, number: int, reason: FinishReason) -> None:
        """The answer is complete."""
        self.over.set()

    def failed(self, number: int, error: MeshError) -> None:
        """There is none."""
        self.error = error
        self.over.set()


@dataclass(frozen=True)
class Gap:
    """How far two answers to one prompt lie apart. step: where the largest gap is, from 0."""

    logprob: float
    step: int


def find_gap(one: tuple[Sequence[int], Sequence[float]], other: tuple[Sequence[int], Sequence[float]]) -> Gap:
    """The largest difference of the logprobs of two greedy answers (token ids, logprobs).

    Where they part, both chose their own best token: their logprobs still have to agree, as two near ties
    do. Behind that step they answer different texts, and nothing is compared.
    """
    largest = Gap(0.0, 0)
    pairs = zip(one[0], one[1], other[0], other[1], strict=False)
    for step, (token, logprob, other_token, other_logprob) in enumerate(pairs):
        gap = abs(logprob - other_logprob)
        if gap > largest.logprob:
            largest = Gap(gap, step)
        if token != other_token:
            break
    return largest


class ParityGate:
    """Runs the trial of one replica against another that serves already."""

    def __init__(self, engine: Engine, config: ParityConfig) -> None:
        self._engine = engine
        self._config = config

    async def reason_to_keep_out(self, candidate: ReplicaInfo, peer: ReplicaInfo) -> str:
        """ "" where every prompt's gap is within the bound; else the prompt, the step and the gap, or what
        failed.
        """
        for number, prompt in enumerate(self._config.prompts):
            try:
                answers = [await self._ask(prompt, info) for info in (candidate, peer)]
            except asyncio.TimeoutError:
                return f"parity prompt {number} was not answered within {self._config.timeout_s:g} s"
            for answer, info in zip(answers, (candidate, peer), strict=True):
                if answer.error is not None:
                    return f"parity prompt {number} failed on {info.worker}: {answer.error.message}"
            mine, theirs = ((each.token_ids, each.logprobs) for each in answers)
            gap = find_gap(mine, theirs)
            if gap.logprob > self._config.max_logprob_gap:
                return (
                    f"parity prompt {number}: its logprobs differ by {gap.logprob:.4f} from those of "
                    f"{peer.worker} at token {gap.step}; the bound is {self._config.max_logprob_gap:g}"
                )
        return ""

    async def _ask(self, prompt: Sequence[int], info: ReplicaInfo) -> _Answer:
        answer = _Answer()
        live = self._engine.submit_trial(
            list(prompt),
            model=info.model,
            group=info.group,
            replica=info.replica,
            max_output_tokens=self._config.output_tokens,
            sampling=sampling_pb2.SamplingParameters(
                temperature=0.0, top_p=1.0, repetition_penalty=1.0, logprobs=True
            ),
            sink=answer,
        )
        if live is None:
            answer.failed(0, MeshError(f"the prompt of {len(prompt)} tokens does not fit"))
            return answer
        try:
            await asyncio.wait_for(answer.over.wait(), self._config.timeout_s)
        except asyncio.TimeoutError:
            self._engine.cancel(live)
            raise
        return answer


def other_class(candidate: ReplicaInfo, serving: Sequence[ReplicaInfo]) -> ReplicaInfo | None:
    """A serving replica to compare with; None where one of the candidate's own class serves, or nobody."""
    if any(info.numeric_class == candidate.numeric_class for info in serving):
        return None
    return serving[0] if serving else None
