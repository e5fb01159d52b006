"""The plugin on its emulated runtime, and runtimes whose operator package was tampered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plugins.kunlun.memory import KunlunMemory
from plugins.kunlun.operators import KunlunOperators
from plugins.kunlun.options import KunlunOptions
from plugins.kunlun.probes import start_operators
from plugins.kunlun.runtime import Runtime, open_runtime

RUNTIME = open_runtime(KunlunOptions(emulate=True))
"""Opened once: it imports the emulator's modules."""
Call = Callable[..., None]
OPERATOR_NAMES: tuple[str, ...] = tuple(RUNTIME.ops.__all__)


def runtime_with(*, without: tuple[str, ...] = (), **changes: Any) -> Runtime:
    """A runtime whose kunlun_ops has other operators, or lacks some."""
    kept = {name: getattr(RUNTIME.ops, name) for name in OPERATOR_NAMES if name not in without}
    return replace(RUNTIME, ops=SimpleNamespace(**{**kept, **changes}))


def operators_of(runtime: Runtime) -> KunlunOperators:
    """Started as the plugin starts them."""
    return start_operators(KunlunMemory(runtime), runtime)


def denied(operators: KunlunOperators) -> dict[str, str]:
    """Operators that failed their comparison at load, and why."""
    return {name: reason for name, reason in operators.declined.items() if name != "sample"}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, rounded to `dtype`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def changing(name: str, **changes: Callable[[Any], Any]) -> Call:
    """The vendor's operator, called with some arguments changed."""
    kernel: Call = getattr(RUNTIME.ops, name)

    def call(**given: Any) -> None:
        kernel(**{**given, **{key: change(given[key]) for key, change in changes.items()}})

    return call
