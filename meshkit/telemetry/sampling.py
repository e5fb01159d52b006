"""Which traces are kept: decided once, where a trace begins; everybody after that follows the flag."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class RootSampler(Sampler):
    """For spans without a parent: a share of them, of which no more than so many a second.

    ratio: 0 to 1, by trace id, so that services of one ratio agree. max_per_s: above 0; None: no bound.
    A span that links to a kept one is kept: a step is worth seeing where a request that it served is seen.
    """

    def __init__(
        self, ratio: float, *, max_per_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ratio = TraceIdRatioBased(ratio)
        self._max_per_s = max_per_s
        self._clock = clock
        # At most a second's worth, and never less than one, at once.
        self._most = max(max_per_s or 0.0, 1.0)
        self._left = self._most
        self._filled_at = clock()

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See Sampler."""
        if links and any(link.context.trace_flags.sampled for link in links):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        result = self._ratio.should_sample(parent_context, trace_id, name, kind, attributes, links)
        if result.decision is Decision.DROP or self.take():
            return result
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        """See Sampler."""
        bound = "" if self._max_per_s is None else f", at most {self._max_per_s:g} a second"
        return f"RootSampler{{{self._ratio.rate:g}{bound}}}"

    def take(self) -> bool:
        """Whether one more may begin now; it counts as begun."""
        if self._max_per_s is None:
            return True
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._filled_at) * self._max_per_s)
        self._filled_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class CallerSampler(Sampler):
    """For spans below a caller that asks for its trace to be kept: as many as `root` has room for."""

    def __init__(self, root: RootSampler) -> None:
        self._root = root

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See Sampler."""
        if self._root.take():
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        """See Sampler."""
        return f"CallerSampler{{{self._root.get_description()}}}"


def request_sampler(
    ratio: float,
    *,
    max_per_s: float | None = None,
    bounds_callers: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Sampler:
    """A `RootSampler` for new traces; a span with a parent follows that.

    bounds_callers: the bound holds for those whose parent is another process', too: anybody may ask the edge
        of a mesh to keep all. Not for what is behind the edge: there half a trace would be kept.
    """
    root = RootSampler(ratio, max_per_s=max_per_s, clock=clock)
    if not bounds_callers:
        return ParentBased(root)
    return ParentBased(root, remote_parent_sampled=CallerSampler(root))
