"""The step kernel's phases as operators of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from plugins.cpu.native.library import PHASES
from plugins.sdk.timing import (
    ATTENTION,
    COPY,
    EMBEDDING,
    LINEAR,
    MLP,
    NORM,
    ROPE,
    SAMPLING,
    OperatorRun,
    OperatorTimes,
    OperatorTotal,
    TimedOperator,
)

# Phase -> what it is called and its class.
_OPERATORS: Mapping[str, tuple[str, str]] = {
    "embed": ("embedding", EMBEDDING),
    "norm": ("rms_norm", NORM),
    "round": ("round rows to int8", LINEAR),
    "qkv": ("qkv_proj", LINEAR),
    "rotate": ("rotary, write_kv", ROPE),
    "attention": ("attention", ATTENTION),
    "out": ("o_proj, add", LINEAR),
    "gate_up": ("gate_up_proj, silu_mul", MLP),
    "down": ("down_proj, add", MLP),
    "gather": ("rows that sample", COPY),
    "head": ("lm_head", LINEAR),
    "sample": ("sample", SAMPLING),
}
NOTE = (
    "the step kernel's times are those of its first thread, waiting for the others at the end of each phase "
    "included"
)


def describe_phases(
    calls: Sequence[int], seconds: Sequence[float], runs: npt.NDArray[np.int64], *, program: str
) -> OperatorTimes:
    """calls, seconds: of each of PHASES. runs: [n, 3] as PhaseRun of step.h. program: what ran them."""
    operators = [TimedOperator(*_OPERATORS[phase], native=True, program=program) for phase in PHASES]
    return OperatorTimes(
        totals=[
            OperatorTotal(operator, count, total)
            for operator, count, total in zip(operators, calls, seconds, strict=True)
            if count
        ],
        runs=[
            OperatorRun(operators[phase], begun * 1e-9, (ended - begun) * 1e-9)
            for phase, begun, ended in runs.tolist()
        ],
        notes=[NOTE],
    )
