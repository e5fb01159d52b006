"""What the vendor's runtime reads from the environment when it loads, and where its pieces lie. No torch."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from meshkit.errors import FailedPrecondition

MODULES = ("torch_xmlir", "cocopod", "xspeedgate_ops", "kunlun_ops")
VISIBILITY = ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Both are set, to the same ids: which of the two wins differs between builds."""
DEVICE_FILE = "xpu"
_LIBRARIES = "/usr/local/xre/so:/usr/local/xccl/so"
_SETTINGS = {
    "CUDA_DEVICE_ORDER": "OAM_ID",
    "XMLIR_FORCE_USE_XPU_GRAPH": "1",
    "XMLIR_ENABLE_MOCK_TORCH_COMPILE": "false",
    "XMLIR_CUDNN_ENABLED": "1",
    "XPU_USE_DEFAULT_CTX": "1",
    "XPU_USE_FAST_SWIGLU": "1",
    "XFT_USE_FAST_SWIGLU": "1",
    "XPU_USE_MOE_SORTED_THRES": "128",
}
"""Defaults: what the operator of the host has set stays."""


@dataclass(frozen=True)
class Piece:
    """A part of the vendor's runtime that was looked for. Without a required one nothing runs."""

    name: str
    where: str
    found: bool
    required: bool


def prepare_environment(environment: MutableMapping[str, str], visible_devices: str | None) -> str | None:
    """Set what the runtime reads when it loads; returns the visible ids, None: all.

    Raises:
        FailedPrecondition: a setting of the host under which the chip does not work, or two visibility
        variables that contradict each other.
    """
    if environment.get("XMLIR_DISABLE_CUDA_ALLOCATOR") == "1":
        raise FailedPrecondition(
            "XMLIR_DISABLE_CUDA_ALLOCATOR is 1: memory statistics and reuse are wrong under it; unset it",
            field="backend",
            reason="ENVIRONMENT",
        )
    environment.pop("XPU_DUMMY_EVENT", None)
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
    visible = visible_devices if visible_devices is not None else _visible_ids(environment)
    if visible is not None:
        environment.update(dict.fromkeys(VISIBILITY, visible))
    return visible


def _visible_ids(environment: Mapping[str, str]) -> str | None:
    given = {name: environment[name] for name in VISIBILITY if name in environment}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{name}={value}" for name, value in given.items())
        raise FailedPrecondition(
            f"{said} contradict each other; set one, or the backend option visible_devices",
            field="backend",
            reason="ENVIRONMENT",
        )
    return next(iter(given.values()), None)


def look_for_runtime(
    *,
    root: Path = Path("/"),
    search_path: str,
    find: Callable[[str], object] = importlib.util.find_spec,
) -> list[Piece]:
    """All pieces, found or not. root: another one than / only in tests. search_path: LD_LIBRARY_PATH."""
    pieces = [Piece(name, "this interpreter's modules", find(name) is not None, True) for name in MODULES]
    pieces += [
        Piece(name, str(root / path), any((root / folder).glob(pattern)), False)
        for name, path, folder, pattern in (
            ("XRE", "usr/local/xre", "usr/local", "xre"),
            ("XCCL (libbkcl.so)", "usr/local/xccl", "usr/local/xccl", "**/libbkcl.so*"),
            ("devices", "dev/xpu[0-9]", "dev", "xpu[0-9]*"),
            ("driver", "dev/xpuctrl", "dev", "xpuctrl"),
        )
    ]
    pieces.append(Piece("xpu-smi", "PATH", shutil.which("xpu-smi") is not None, False))
    named = all(folder in search_path.split(":") for folder in _LIBRARIES.split(":"))
    pieces.append(Piece("library path", f"LD_LIBRARY_PATH ({_LIBRARIES})", named, False))
    return pieces


def require_pieces(pieces: list[Piece]) -> None:
    """Raises FailedPrecondition, with all that was looked for and where, unless all required are there."""
    missing = [piece.name for piece in pieces if piece.required and not piece.found]
    if not missing:
        return
    looked = "; ".join(
        f"{piece.name} in {piece.where}: {'found' if piece.found else 'absent'}" for piece in pieces
    )
    raise FailedPrecondition(
        f"the Kunlun runtime is not here: {', '.join(missing)} cannot be imported. Looked for: {looked}. Run "
        "the worker in the vendor's image or name its interpreter in executor.python; the backend option "
        "emulate=true runs an emulator of the runtime instead, for tests",
        field="backend",
        reason="RUNTIME_ABSENT",
        missing=", ".join(missing),
    )
