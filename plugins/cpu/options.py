"""Options of the `cpu` plugin, as `backend_options` carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import InvalidArgument

_MOST_THREADS = 1024
KERNELS = ("auto", "off", "avx512_vnni", "avx512", "avx2", "baseline")


@dataclass(frozen=True)
class CpuOptions:
    """threads: compute threads, at least 1; None: torch's choice, which follows OMP_NUM_THREADS.

    kernel: the native step kernel, one of KERNELS: by the best instruction set of the processor, not at all,
    or by a certain one.
    """

    threads: int | None = None
    kernel: str = "auto"


def read_options(options: Mapping[str, str]) -> CpuOptions:
    """Raises InvalidArgument that names the option at fault."""
    unknown = sorted(set(options) - {"threads", "kernel"})
    if unknown:
        raise InvalidArgument(
            f"backend option {unknown[0]!r} is unknown to the cpu plugin; it takes: threads, kernel",
            field=f"backend_options.{unknown[0]}",
        )
    return CpuOptions(
        threads=_read_threads(options.get("threads", "")), kernel=_read_kernel(options.get("kernel", "auto"))
    )


def _read_threads(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST_THREADS:
        raise InvalidArgument(
            f"backend option threads is {text!r}; it has to be a whole number from 1 to {_MOST_THREADS}",
            field="backend_options.threads",
        )
    return int(text)


def _read_kernel(text: str) -> str:
    if text not in KERNELS:
        raise InvalidArgument(
            f"backend option kernel is {text!r}; it has to be one of {', '.join(KERNELS)}",
            field="backend_options.kernel",
        )
    return text
