"""What a constraint may cost, as the gateway and its checker both know it."""

from __future__ import annotations

from dataclasses import dataclass

UNSUPPORTED = "CONSTRAINT_UNSUPPORTED"
"""Reason: no output of the model can be given a form."""


@dataclass(frozen=True)
class Limits:
    """Seconds of processor time. compile_s: of a form. mask_s: of what may come after one token. total_s: of
    both, for all tokens that are tried; the kernel sees to it.
    """

    compile_s: float
    mask_s: float
    total_s: float
