"""Watches a group against bounds on errors, TTFT, token gap and divergence: when to take its traffic away."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_PERCENTILE = 0.9
"""Latency bounds are on the 90th percentile of the window: one slow request is no reason, a tenth is."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a group may do. None: not bounded. Times in seconds, shares in [0, 1].

    max_error_share: of ended requests that failed by no fault of their client's. max_ttft_s, max_token_gap_s:
    90th percentiles. min_agreement: share of compared output tokens that are those of the other group.
    min_requests: judged by no fewer. window: the newest so many count.
    """

    max_error_share: float | None = None
    max_ttft_s: float | None = None
    max_token_gap_s: float | None = None
    min_agreement: float | None = None
    min_requests: int = 20
    window: int = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended on the group. Times None where there were too few tokens to tell."""

    failed: bool
    ttft_s: float | None = None
    token_gap_s: float | None = None


class Guard:
    """One group. Each record returns why the group is out of bounds, or ""."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._ended: deque[Ended] = deque(maxlen=bounds.window)
        self._agreement: deque[tuple[int, int]] = deque(maxlen=bounds.window)

    def __repr__(self) -> str:
        return f"<Guard of {len(self._ended)} requests>"

    def reset(self) -> None:
        """Judge anew, as after a change of weights by hand."""
        self._ended.clear()
        self._agreement.clear()

    def record_end(self, ended: Ended) -> str:
        """A request ended."""
        self._ended.append(ended)
        if len(self._ended) < self._bounds.min_requests:
            return ""
        return self._errors() or self._slow("TTFT", self._bounds.max_ttft_s, [
            each.ttft_s for each in self._ended if each.ttft_s is not None
        ]) or self._slow("token gap", self._bounds.max_token_gap_s, [
            each.token_gap_s for each in self._ended if each.token_gap_s is not None
        ])  # fmt: skip

    def record_comparison(self, *, equal_tokens: int, tokens: int) -> str:
        """A mirrored request ended, `equal_tokens` of its `tokens` as in the answer that was served."""
        self._agreement.append((equal_tokens, tokens))
        least = self._bounds.min_agreement
        if least is None or len(self._agreement) < self._bounds.min_requests:
            return ""
        share = sum(equal for equal, _ in self._agreement) / max(
            sum(count for _, count in self._agreement), 1
        )
        if share >= least:
            return ""
        return (
            f"{share:.1%} of the tokens of {len(self._agreement)} mirrored requests agree; the bound is "
            f"{least:.1%}"
        )

    def _errors(self) -> str:
        bound = self._bounds.max_error_share
        failed = sum(each.failed for each in self._ended)
        if bound is None or failed <= bound * len(self._ended):
            return ""
        return f"{failed} of the last {len(self._ended)} requests failed; the bound is {bound:.1%}"

    def _slow(self, name: str, bound: float | None, seconds: Sequence[float]) -> str:
        if bound is None or len(seconds) < self._bounds.min_requests:
            return ""
        ordered = sorted(seconds)
        worst = ordered[min(len(ordered) - 1, int(_PERCENTILE * len(ordered)))]
        if worst <= bound:
            return ""
        return (
            f"the 90th percentile of the {name} is {worst:.3f} s over {len(ordered)} requests; the bound is "
            f"{bound:g} s"
        )
