"""Options of the `cpu` plugin, as `backend_options` carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import InvalidArgument
from plugins.sdk.communication import OPTIONS, PLUGINS_CHOICE, CommunicationOptions, read_communication

_MOST = {"threads": 1024, "devices": 1024}
_KNOWN = ("threads", "devices", "kernel", *OPTIONS)
KERNELS = ("auto", "off", "avx512_vnni", "avx512", "avx2", "baseline")


@dataclass(frozen=True)
class CpuOptions:
    """threads: compute threads, at least 1; None: torch's choice, which follows OMP_NUM_THREADS. devices:
    places for executors, at least 1, which share the processors; None: one for each processor.

    kernel: the native step kernel, one of KERNELS: by the best instruction set of the processor, not at all,
    or by a certain one. communication: of the ranks of a set.
    """

    threads: int | None = None
    devices: int | None = None
    kernel: str = "auto"
    communication: CommunicationOptions = PLUGINS_CHOICE


def read_options(options: Mapping[str, str]) -> CpuOptions:
    """Raises InvalidArgument that names the option at fault."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise InvalidArgument(
            f"backend option {unknown[0]!r} is unknown to the cpu plugin; it takes: {', '.join(_KNOWN)}",
            field=f"backend_options.{unknown[0]}",
        )
    return CpuOptions(
        threads=_read_count(options, "threads"),
        devices=_read_count(options, "devices"),
        kernel=_read_kernel(options.get("kernel", "auto")),
        communication=read_communication(options),
    )


def _read_count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST[name]:
        raise InvalidArgument(
            f"backend option {name} is {text!r}; it has to be a whole number from 1 to {_MOST[name]}",
            field=f"backend_options.{name}",
        )
    return int(text)


def _read_kernel(text: str) -> str:
    if text not in KERNELS:
        raise InvalidArgument(
            f"backend option kernel is {text!r}; it has to be one of {', '.join(KERNELS)}",
            field="backend_options.kernel",
        )
    return text
