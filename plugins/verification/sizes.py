"""Sizes of messages on the command line: 1KiB..64MiB, or 4KiB,1MiB."""

from __future__ import annotations

import re

from meshkit.errors import InvalidArgument

_STEP = 4
_LARGEST_BYTES = 1 << 30
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"^(\d+)\s*(B|KiB|MiB|GiB|)$")


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes, ascending. FIRST..LAST: each four times the one before, LAST always among them.

    Raises:
        InvalidArgument: (--sizes) no size, one below 4 bytes or above 1 GiB, or LAST below FIRST.
    """
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(sorted({_parse(word) for word in text.split(",")}))
    low, high = _parse(first), _parse(last)
    if high < low:
        raise InvalidArgument(f"--sizes: {text!r} ends below its beginning", field="--sizes")
    sizes = [low]
    while sizes[-1] * _STEP < high:
        sizes.append(sizes[-1] * _STEP)
    return tuple(dict.fromkeys([*sizes, high]))


def show_size(size_bytes: int) -> str:
    """The size in the largest unit that divides it."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]} {unit}"
    return f"{size_bytes} B"


def _parse(word: str) -> int:
    match = _SIZE.match(word.strip())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 4 <= size <= _LARGEST_BYTES:
        raise InvalidArgument(
            f"--sizes: {word!r} is no size from 4 B to 1 GiB; write for instance 64KiB", field="--sizes"
        )
    return size
