"""Which algorithm an all_reduce takes: one of few rounds below a border in bytes, else the library's own.

No torch. The border comes from the plugin, or from its option `all_reduce_border`: bytes, or "measured".
`overlap_rows`, the other option of plugins with collectives, is read here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshkit.errors import InvalidArgument

BORDER, OVERLAP_ROWS = OPTIONS = ("all_reduce_border", "overlap_rows")
"""Names of options."""
MEASURED: Literal["measured"] = "measured"
GATHER = "gather"
"""Every rank gets all inputs and adds them in the order of ranks."""
Border = int | Literal["measured"]
"""Bytes from which on the library's own algorithm is taken; 0: always. "measured": as a group is joined."""
TRIED_BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
"""Messages that are timed to measure it."""
_LARGEST = 1 << 30


@dataclass(frozen=True)
class CommunicationOptions:
    """What the options of a plugin say of its collectives; None: nothing, the plugin's own choice counts.

    border: see Border. overlap_rows: rows from which on a piece of a product is summed while the next one is
    computed; 0: never (CapabilityReport.overlap_rows).
    """

    border: Border | None = None
    overlap_rows: int | None = None


PLUGINS_CHOICE = CommunicationOptions()
"""No option is set."""


def read_communication(options: Mapping[str, str]) -> CommunicationOptions:
    """The options OPTIONS of a plugin.

    Raises:
        InvalidArgument: (backend_options.NAME) one is neither a number in its range nor, for the border,
            "measured".
    """
    border: Border | None = MEASURED
    if options.get(BORDER) != MEASURED:
        border = _read_number(options, BORDER, f"{MEASURED}, or bytes")
    return CommunicationOptions(border, _read_number(options, OVERLAP_ROWS, "rows"))


def _read_number(options: Mapping[str, str], name: str, form: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) > _LARGEST:
        raise InvalidArgument(
            f"backend option {name} is {text!r}; it has to be {form} from 0, which is never, to {_LARGEST}",
            field=f"backend_options.{name}",
        )
    return int(text)


def find_border(gather_s: Sequence[float], library_s: Sequence[float]) -> int:
    """The border by the times at TRIED_BYTES: the first size at which gathering is not faster.

    Beyond the largest size that was tried nothing is known, so that it is the border at most.
    """
    for size, gather, library in zip(TRIED_BYTES, gather_s, library_s, strict=True):
        if gather >= library:
            return size if size > TRIED_BYTES[0] else 0
    return TRIED_BYTES[-1]
