"""Accelerators of this host and the links that they share, from sysfs, by PCI class: none by name."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from meshkit.cli.doctor.facts import ChipFacts

ADDRESS = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
ACCELERATOR_CLASSES = ("0x0302", "0x12")
"""3D controllers without a display; processing accelerators."""
DISPLAY_CLASS = "0x0300"
"""Also what shows a server's console; counted where its memory window is a chip's (LARGE_BAR)."""
LARGE_BAR = 128 * 1024 * 1024


def find_chips(sysfs: Path, *, used: Collection[str]) -> tuple[ChipFacts, ...]:
    """The chips at `used` (PCI addresses) where executors have told any, else all accelerators here."""
    folder = sysfs / "bus/pci/devices"
    if not folder.is_dir():
        return ()
    devices = sorted(each for each in folder.iterdir() if ADDRESS.match(each.name))
    chosen = (
        [each for each in devices if each.name in used]
        if used
        else [each for each in devices if _is_accelerator(each)]
    )
    return tuple(_describe(each) for each in chosen)


def _is_accelerator(device: Path) -> bool:
    kind = _text(device / "class")
    if kind.startswith(ACCELERATOR_CLASSES):
        return True
    return kind.startswith(DISPLAY_CLASS) and _largest_window(device) >= LARGE_BAR


def _largest_window(device: Path) -> int:
    """Bytes of the largest region that the device maps."""
    sizes = [0]
    for line in _text(device / "resource").splitlines():
        words = line.split()
        if len(words) == 3:
            first, last = int(words[0], 16), int(words[1], 16)
            sizes.append(last - first + 1 if last else 0)
    return max(sizes)


def _describe(device: Path) -> ChipFacts:
    """The real path is /sys/devices/pci0000:17/0000:17:00.0/.../0000:1a:00.0: root complex, root port, ..."""
    parts = device.resolve().parts
    root = max((index for index, part in enumerate(parts) if part.startswith("pci")), default=None)
    below = parts[root + 1 :] if root is not None else ()
    group = device / "iommu_group"
    return ChipFacts(
        address=device.name,
        root=parts[root] if root is not None else "",
        port=below[0] if len(below) > 1 else None,
        iommu_group=group.resolve().name if group.exists() else None,
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
