"""Plants PCI devices in a tree that looks like /sys."""

from __future__ import annotations

from pathlib import Path


def plant_pci_device(
    sysfs: Path, path: str, *, kind: str = "0x030200", iommu_group: str = "", window_bytes: int = 32 << 30
) -> None:
    """path: below /sys/devices, such as "pci0000:17/0000:17:00.0/0000:18:00.0". kind: its PCI class.
    window_bytes: of the largest region that it maps.
    """
    device = sysfs / "devices" / path
    device.mkdir(parents=True)
    (device / "class").write_text(f"{kind}\n")
    (device / "resource").write_text(f"0x{1 << 40:016x} 0x{(1 << 40) + window_bytes - 1:016x} 0x{0:016x}\n")
    bus = sysfs / "bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / device.name).symlink_to(device)
    if iommu_group:
        group = sysfs / "kernel/iommu_groups" / iommu_group
        group.mkdir(parents=True, exist_ok=True)
        (device / "iommu_group").symlink_to(group)
