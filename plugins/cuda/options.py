"""Options of the `cuda` plugin, as `backend_options` carries them. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import InvalidArgument
from plugins.sdk.communication import OPTIONS, PLUGINS_CHOICE, CommunicationOptions, read_communication

KERNEL_LIBRARIES = ("flashinfer", "triton")
"""Libraries of kernels beside torch's own, the preferred one first."""
_KNOWN = ("kernel_libraries", "visible_devices", *OPTIONS)
_NONE = "none"
# What CUDA_VISIBLE_DEVICES takes: an index, or the UUID of a GPU or of a part of one (MIG), which may be cut
# short.
_DEVICE = re.compile(r"^(\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-zA-Z/-]+)$")


@dataclass(frozen=True)
class CudaOptions:
    """visible_devices: ids or UUIDs such as "2,3", numbered from 0 by us; None: as the environment has it.

    kernel_libraries: those to use beside torch, which then have to be there; empty: torch alone; None: those
    that are there. communication: of the ranks of a set.
    """

    visible_devices: str | None = None
    kernel_libraries: tuple[str, ...] | None = None
    communication: CommunicationOptions = PLUGINS_CHOICE


def read_options(options: Mapping[str, str]) -> CudaOptions:
    """Raises InvalidArgument that names the option at fault."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise InvalidArgument(
            f"backend option {unknown[0]!r} is unknown to the cuda plugin; it takes: {', '.join(_KNOWN)}",
            field=f"backend_options.{unknown[0]}",
        )
    return CudaOptions(
        visible_devices=_read_devices(options.get("visible_devices")),
        kernel_libraries=_read_libraries(options.get("kernel_libraries")),
        communication=read_communication(options),
    )


def _read_devices(text: str | None) -> str | None:
    if text is None:
        return None
    parts = _split(text)
    if not all(map(_DEVICE.match, parts)) or len(set(parts)) < len(parts):
        raise InvalidArgument(
            f"backend option visible_devices is {text!r}; it has to be ids or UUIDs without repetition such "
            "as 0,1 or GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
            field="backend_options.visible_devices",
        )
    return ",".join(parts)


def _read_libraries(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    parts = _split(text)
    if parts == [_NONE]:
        return ()
    unknown = [part for part in parts if part not in KERNEL_LIBRARIES]
    if unknown:
        raise InvalidArgument(
            f"backend option kernel_libraries is {text!r}; it has to be {_NONE}, or some of "
            f"{', '.join(KERNEL_LIBRARIES)} with commas between",
            field="backend_options.kernel_libraries",
        )
    return tuple(library for library in KERNEL_LIBRARIES if library in parts)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]
