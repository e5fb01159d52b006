"""The scenarios, one file per family. Importing this package defines them all."""

from __future__ import annotations

from chaos.scenarios import (
    cancels,
    deaths,
    freezes,
    hangs,
    inputs,
    messages,
    overload,
    partitions,
    readers,
    requests,
    restarts,
    swaps,
)

__all__ = [
    "cancels",
    "deaths",
    "freezes",
    "hangs",
    "inputs",
    "messages",
    "overload",
    "partitions",
    "readers",
    "requests",
    "restarts",
    "swaps",
]
