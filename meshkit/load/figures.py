"""From samples to figures. Pure; the words are those of the design's names.md.

TTFT: sent to first token received. TPOT: (last - first token) / (output tokens - 1). ITL: the gap before each
token after the first message's; of a message with n tokens, n gaps of a n-th. E2E: sent to the stream's end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshkit.errors import InvalidArgument
from meshkit.load.sample import Sample

PERCENTILES = (50, 90, 95, 99)
BOUNDS = ("ttft", "tpot", "e2e")


def describe_samples(
    samples: Sequence[Sample], *, elapsed_s: float | None = None, goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The figures of a run, ready for JSON. Rates and times are of requests that ended well.

    elapsed_s: default: from the first request sent to the last stream's end; warm-up is not in it.
    goodput: bounds in milliseconds by ttft, tpot, e2e; a request with one token meets any tpot.
    A figure that cannot be had is None.

    Raises:
        InvalidArgument: no samples; an elapsed_s or a bound that is none.
    """
    _check(samples, elapsed_s, goodput or {})
    whole = [sample for sample in samples if sample.error is None]
    elapsed = elapsed_s if elapsed_s is not None else _elapsed_s(samples)
    output = sum(sample.output_tokens for sample in whole)
    messages = sum(len(sample.times_s) for sample in whole)
    prompt, cached = _prompt_tokens(whole), _cached_tokens(whole)
    by_token = all(sample.counts_are_known for sample in whole)
    return {
        "requests": len(samples),
        "completed": len(whole),
        "failed": len(samples) - len(whole),
        "errors": _count_errors(samples),
        "elapsed_s": round(elapsed, 4),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "shorter_than_asked": sum(sample.output_tokens < sample.max_tokens for sample in whole),
        "requests_per_s": _rate(len(whole), elapsed),
        "output_tokens_per_s": _rate(output, elapsed),
        "total_tokens_per_s": None if prompt is None else _rate(prompt + output, elapsed),
        "ttft_ms": summarise([sample.ttft_s for sample in whole]),
        "tpot_ms": summarise([sample.tpot_s for sample in whole]),
        "itl_ms": summarise(token_gaps_s(whole)),
        "itl_is_by": "token" if by_token else "message",
        "message_gap_ms": summarise(
            [later - earlier for each in whole for earlier, later in pairwise(each.times_s)]
        ),
        "e2e_ms": summarise([sample.e2e_s for sample in whole]),
        "late_ms": summarise(
            [sample.sent_s - sample.due_s for sample in whole if sample.due_s is not None]
        ),
        "tokens_per_message": round(output / messages, 3) if messages else None,
        "cached_tokens": cached,
        "cached_share": round(cached / prompt, 4) if cached is not None and prompt else None,
        "goodput": _describe_goodput(whole, goodput, elapsed) if goodput else None,
        "client_cpu_us_per_token": round(_cpu_s(samples) * 1e6 / output, 2) if output else None,
        "notes": _notes(by_token),
    }  # fmt: skip


def token_gaps_s(samples: Sequence[Sample]) -> list[float]:
    """ITL in seconds. A message of unknown size counts as one token."""
    gaps: list[float] = []
    for sample in samples:
        for (earlier, later), count in zip(pairwise(sample.times_s), sample.counts[1:], strict=True):
            tokens = count or 1
            gaps += [(later - earlier) / tokens] * tokens
    return gaps


def summarise(values_s: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds of what is not None; None where nothing is left."""
    ordered = sorted(value for value in values_s if value is not None)
    if not ordered:
        return None
    shown = {"mean": math.fsum(ordered) / len(ordered)}
    shown |= {f"p{share}": percentile(ordered, share) for share in PERCENTILES}
    return {name: round(value * 1e3, 3) for name, value in shown.items()}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, not empty; share in [0, 100]; linear between the two nearest ranks, as numpy's."""
    place = (len(ordered) - 1) * share / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Bounds in milliseconds from "ttft:500 tpot:50", in one word or several.

    Raises:
        InvalidArgument: (--goodput) a word that is no bound.
    """
    bounds: dict[str, float] = {}
    for word in " ".join(words).split():
        name, _, value = word.partition(":")
        try:
            bounds[name] = float(value)
        except ValueError:
            raise InvalidArgument(
                f"--goodput: {word!r} is no bound; NAME:MILLISECONDS is one, NAME of {', '.join(BOUNDS)}",
                field="--goodput",
            ) from None
    _check_goodput(bounds)
    return bounds


def _check(samples: Sequence[Sample], elapsed_s: float | None, goodput: Mapping[str, float]) -> None:
    if not samples:
        raise InvalidArgument("samples: there are none, so there is nothing to describe", field="samples")
    if elapsed_s is not None and not (math.isfinite(elapsed_s) and elapsed_s > 0):
        raise InvalidArgument(
            f"elapsed_s is {elapsed_s}; a finite number above 0 is allowed", field="elapsed_s"
        )
    _check_goodput(goodput)


def _check_goodput(bounds: Mapping[str, float]) -> None:
    for name, bound in bounds.items():
        if name not in BOUNDS:
            raise InvalidArgument(
                f"--goodput: {name!r} is no bound; there are {', '.join(BOUNDS)}", field="--goodput"
            )
        if not (math.isfinite(bound) and bound > 0):
            raise InvalidArgument(
                f"--goodput: {name} is {bound}; a number of milliseconds above 0 is allowed",
                field="--goodput",
            )


def _elapsed_s(samples: Sequence[Sample]) -> float:
    return max(sample.ended_s for sample in samples) - min(sample.sent_s for sample in samples)


def _cpu_s(samples: Sequence[Sample]) -> float:
    return max(each.ended_cpu_s for each in samples) - min(each.sent_cpu_s for each in samples)


def _rate(count: int, elapsed_s: float) -> float | None:
    return round(count / elapsed_s, 3) if elapsed_s > 0 else None


def _prompt_tokens(samples: Sequence[Sample]) -> int | None:
    counts = [sample.prompt_tokens for sample in samples]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _cached_tokens(samples: Sequence[Sample]) -> int | None:
    counts = [None if sample.usage is None else sample.usage.cached_tokens for sample in samples]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count_errors(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    counts = Counter(sample.error for sample in samples if sample.error is not None)
    example = {sample.error: sample.error_message for sample in reversed(samples)}
    return {error: {"count": count, "example": example[error]} for error, count in counts.most_common()}


def _describe_goodput(
    samples: Sequence[Sample], bounds: Mapping[str, float], elapsed_s: float
) -> dict[str, Any]:
    good = sum(_meets(sample, bounds) for sample in samples)
    return {
        "bounds_ms": dict(bounds),
        "requests": good,
        "requests_per_s": _rate(good, elapsed_s),
    }


def _meets(sample: Sample, bounds: Mapping[str, float]) -> bool:
    times_s = {"ttft": sample.ttft_s, "tpot": sample.tpot_s or 0.0, "e2e": sample.e2e_s}
    return all((time_s := times_s[name]) is not None and time_s * 1e3 <= bounds[name] for name in bounds)


def _notes(by_token: bool) -> list[str]:
    if by_token:
        return []
    note = (
        "the server put several tokens into a message without saying how many, so ITL is by message; tokens "
        "are counted by its usage"
    )
    return [note]
