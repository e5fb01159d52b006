"""How a plugin says that it declined an operator since a trial at its start went wrong. No torch.

What is declined by design (the chip has no such kernel) is no fault; an operator that the plugin brings,
tries when it starts and finds wrong is one, and `chipmesh conformance` reports it. Both run on the reference.
"""

from __future__ import annotations

_MARK = "declined at start: "


def declined_at_start(reason: str) -> str:
    """The reason for `OperatorSet.declined` of an operator whose trial at start went wrong."""
    return _MARK + reason


def was_declined_at_start(reason: str) -> bool:
    """Whether `declined_at_start` made this reason, as a capability report carries it."""
    return reason.startswith(_MARK)
