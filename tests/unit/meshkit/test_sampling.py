"""Which traces are kept."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from meshkit.telemetry.sampling import RootSampler, request_sampler

TRACES = [number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128) for number in range(1, 4001)]


def kept(sampler: RootSampler, trace_id: int, links: list[Link] | None = None) -> bool:
    return sampler.should_sample(None, trace_id, "span", links=links).decision is Decision.RECORD_AND_SAMPLE


def context(*, sampled: bool) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return SpanContext(trace_id=7, span_id=9, is_remote=True, trace_flags=flags)


def test_the_share_of_new_traces_is_kept_and_every_service_keeps_the_same_ones() -> None:
    one, other = RootSampler(0.1), RootSampler(0.1)
    chosen = [trace for trace in TRACES if kept(one, trace)]
    assert 300 < len(chosen) < 500
    assert chosen == [trace for trace in TRACES if kept(other, trace)]


def test_no_more_than_the_bound_begin_in_a_second() -> None:
    now = 100.0
    sampler = RootSampler(1.0, max_per_s=5, clock=lambda: now)
    assert sum(kept(sampler, trace) for trace in TRACES) == 5
    now += 0.4
    assert sum(kept(sampler, trace) for trace in TRACES) == 2
    now += 3600
    assert sum(kept(sampler, trace) for trace in TRACES) == 5


def test_a_bound_below_one_a_second_still_keeps_one_at_times() -> None:
    now = 100.0
    sampler = RootSampler(1.0, max_per_s=0.1, clock=lambda: now)
    assert [kept(sampler, 1), kept(sampler, 2)] == [True, False]
    now += 10.5
    assert [kept(sampler, 3), kept(sampler, 4)] == [True, False]


def test_a_span_that_links_to_a_kept_one_is_kept() -> None:
    sampler = RootSampler(0.0)
    assert kept(sampler, 1, [Link(context(sampled=False)), Link(context(sampled=True))])
    assert not kept(sampler, 1, [Link(context(sampled=False))])
    assert not kept(sampler, 1)


def test_at_the_edge_the_bound_holds_for_callers_that_ask_and_for_our_own_traces_together() -> None:
    now = 100.0
    sampler = request_sampler(1.0, max_per_s=5, bounds_callers=True, clock=lambda: now)

    def keeps(*, remote: bool | None, sampled: bool = True) -> bool:
        """remote: whether the parent is another process'; None: there is none."""
        parent = Context()
        if remote is not None:
            flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
            own = SpanContext(trace_id=7, span_id=9, is_remote=remote, trace_flags=flags)
            parent = set_span_in_context(NonRecordingSpan(own), parent)
        return sampler.should_sample(parent, 7, "span").decision is Decision.RECORD_AND_SAMPLE

    assert [keeps(remote=True) for _ in range(4)] == [True] * 4
    assert [keeps(remote=None) for _ in range(3)] == [True, False, False]
    assert not keeps(remote=True)
    assert keeps(remote=False), "what is below a span that was kept is kept, too"
    assert not keeps(remote=True, sampled=False)


def test_a_callers_choice_is_followed_whatever_the_share_and_the_bound() -> None:
    for ratio, sampled in ((0.0, True), (1.0, False)):
        sampler = request_sampler(ratio, max_per_s=0.001)
        for trace in TRACES[:20]:
            parent = set_span_in_context(NonRecordingSpan(context(sampled=sampled)), Context())
            decision = sampler.should_sample(parent, trace, "span").decision
            assert (decision is Decision.RECORD_AND_SAMPLE) is sampled
