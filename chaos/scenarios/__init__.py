"""The scenarios, one file per family. Importing this package defines them all."""

from __future__ import annotations

from chaos.scenarios import (
    cancels,
    clock_jumps,
    deaths,
    frames,
    freezes,
    hangs,
    inputs,
    messages,
    overload,
    partitions,
    ranks,
    readers,
    requests,
    restarts,
    soak,
    swaps,
    transports,
)

__all__ = [
    "cancels",
    "clock_jumps",
    "deaths",
    "frames",
    "freezes",
    "hangs",
    "inputs",
    "messages",
    "overload",
    "partitions",
    "ranks",
    "readers",
    "requests",
    "restarts",
    "soak",
    "swaps",
    "transports",
]
