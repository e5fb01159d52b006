"""What CUDA reads from the environment when it starts, and what a usable GPU leaves on a host. No torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from meshkit.errors import FailedPrecondition
from plugins.sdk.visibility import count_device_files

VISIBILITY = "CUDA_VISIBLE_DEVICES"
DRIVER_LIBRARY = "libcuda.so.1"
DEVICE_FILES = "nvidia"
"""The driver's files are /dev/nvidia0, /dev/nvidia1 and so on."""
_SETTINGS = {
    # Ids as nvidia-smi and NVML count them; CUDA's own default puts the fastest GPU first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Deadlines of collectives are ours (plugins.cuda.collectives): torch's watchdog would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Defaults: what the operator of the host has set stays."""


@dataclass(frozen=True)
class Piece:
    """Something that was looked for. state: "found", "absent", or what it is."""

    name: str
    state: str


def prepare_environment(environment: MutableMapping[str, str], visible_devices: str | None) -> str | None:
    """Set what CUDA and torch read when they start; returns the visible ids or UUIDs, None: all."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
    if visible_devices is not None:
        environment[VISIBILITY] = visible_devices
    return environment.get(VISIBILITY)


def look_for_driver(
    visible: str | None, *, root: Path = Path("/"), load: Callable[[str], object] = ctypes.CDLL
) -> list[Piece]:
    """The parts of a usable GPU beside torch. root: another one than / only in tests."""
    return [
        Piece(f"driver library {DRIVER_LIBRARY}", _found(_loads(DRIVER_LIBRARY, load))),
        Piece(f"{root / 'dev'}/nvidia[0-9]", f"{count_device_files(DEVICE_FILES, None, root=root)} files"),
        Piece(VISIBILITY, "not set" if visible is None else f"{visible!r}"),
    ]


def no_device(cause: str, torch_build: str, pieces: list[Piece]) -> FailedPrecondition:
    """The refusal for a host without a usable GPU, with all that was looked for and the way out."""
    looked = "; ".join(f"{piece.name}: {piece.state}" for piece in (Piece("torch", torch_build), *pieces))
    return FailedPrecondition(
        f"no CUDA device can be used here: {cause}. Looked for: {looked}. Install the NVIDIA driver and a "
        "CUDA build of torch (pytorch.org lists them by CUDA version), start a container with --gpus all, "
        f"name GPUs that nvidia-smi -L lists in {VISIBILITY}, or choose another backend",
        field="backend",
        reason="NO_DEVICE",
    )


def _loads(library: str, load: Callable[[str], object]) -> bool:
    try:
        load(library)
    except OSError:
        return False
    return True


def _found(present: bool) -> str:
    return "found" if present else "absent"
