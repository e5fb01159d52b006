"""Options of the `cpu` plugin, as `backend_options` carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import InvalidArgument

_MOST_THREADS = 1024


@dataclass(frozen=True)
class CpuOptions:
    """threads: compute threads, at least 1; None: torch's choice, which follows OMP_NUM_THREADS."""

    threads: int | None = None


def read_options(options: Mapping[str, str]) -> CpuOptions:
    """Raises InvalidArgument that names the option at fault."""
    unknown = sorted(set(options) - {"threads"})
    if unknown:
        raise InvalidArgument(
            f"backend option {unknown[0]!r} is unknown to the cpu plugin; it takes: threads",
            field=f"backend_options.{unknown[0]}",
        )
    return CpuOptions(threads=_read_threads(options.get("threads", "")))


def _read_threads(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST_THREADS:
        raise InvalidArgument(
            f"backend option threads is {text!r}; it has to be a whole number from 1 to {_MOST_THREADS}",
            field="backend_options.threads",
        )
    return int(text)
