"""What "better" means: one figure of a run, and one that must not fall for it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from meshkit.errors import InvalidArgument


class Objective(enum.Enum):
    """By the flag's words."""

    THROUGHPUT = "throughput"
    """Output tokens a second."""
    GOODPUT = "goodput"
    """Requests a second that meet the bounds of --goodput."""
    TTFT = "ttft"
    """The lowest median time to the first token, at no fewer output tokens a second."""

    @property
    def unit(self) -> str:
        """Of `figure`."""
        if self is Objective.THROUGHPUT:
            return "output tokens/s"
        return "good requests/s" if self is Objective.GOODPUT else "ms to the first token"

    def figure(self, report: Mapping[str, Any]) -> float:
        """As people read it, from a report of `run_bench`."""
        if self is Objective.THROUGHPUT:
            return float(report["output_tokens_per_s"])
        if self is Objective.GOODPUT:
            return float(report["goodput"]["requests_per_s"])
        return float(report["ttft_ms"]["p50"])

    def score(self, report: Mapping[str, Any]) -> float:
        """Greater is better."""
        figure = self.figure(report)
        return 1e3 / figure if self is Objective.TTFT else figure

    def floor(self, report: Mapping[str, Any]) -> float | None:
        """What must not fall below the default's, if anything."""
        return float(report["output_tokens_per_s"]) if self is Objective.TTFT else None


def parse_objective(word: str, *, bounds: Mapping[str, float]) -> Objective:
    """bounds: those of --goodput.

    Raises:
        InvalidArgument: (--objective) another word; (--goodput) it has no bounds, which goodput needs.
    """
    try:
        objective = Objective(word)
    except ValueError:
        known = ", ".join(each.value for each in Objective)
        raise InvalidArgument(f"--objective is {word!r}; {known} are known", field="--objective") from None
    if objective is Objective.GOODPUT and not bounds:
        raise InvalidArgument(
            "--objective goodput needs its bounds, for instance --goodput 'ttft:500 tpot:50'",
            field="--goodput",
        )
    return objective
