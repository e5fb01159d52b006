"""Chips and their links out of planted sysfs trees."""

from __future__ import annotations

from pathlib import Path

from meshkit.cli.doctor.facts import ChipFacts
from meshkit.cli.doctor.probe_chips import find_chips
from tests.support.sysfs import plant_pci_device


def test_a_chip_is_told_with_its_root_complex_its_root_port_and_its_iommu_group(tmp_path: Path) -> None:
    plant_pci_device(tmp_path, "pci0000:17/0000:17:00.0/0000:18:00.0", iommu_group="12")
    assert find_chips(tmp_path, used=()) == (ChipFacts("0000:18:00.0", "pci0000:17", "0000:17:00.0", "12"),)


def test_a_chip_behind_a_switch_has_the_port_above_the_switch(tmp_path: Path) -> None:
    plant_pci_device(tmp_path, "pci0000:17/0000:17:00.0/0000:18:00.0/0000:19:04.0/0000:1a:00.0")
    assert find_chips(tmp_path, used=())[0].port == "0000:17:00.0"


def test_a_chip_on_the_root_complex_itself_has_no_port_and_without_iommu_no_group(tmp_path: Path) -> None:
    plant_pci_device(tmp_path, "pci0000:00/0000:00:02.0", kind="0x120000")
    assert find_chips(tmp_path, used=()) == (ChipFacts("0000:00:02.0", "pci0000:00", None, None),)


def test_network_cards_and_a_servers_console_are_no_chips(tmp_path: Path) -> None:
    plant_pci_device(tmp_path, "pci0000:00/0000:00:03.0", kind="0x020000")
    plant_pci_device(tmp_path, "pci0000:00/0000:00:04.0", kind="0x030000", window_bytes=16 << 20)
    plant_pci_device(tmp_path, "pci0000:00/0000:00:05.0", kind="0x030000", window_bytes=16 << 30)
    assert [chip.address for chip in find_chips(tmp_path, used=())] == ["0000:00:05.0"]


def test_where_executors_tell_their_chips_only_those_are_looked_at(tmp_path: Path) -> None:
    for slot in ("1", "2"):
        plant_pci_device(tmp_path, f"pci0000:00/0000:00:0{slot}.0")
    assert [chip.address for chip in find_chips(tmp_path, used={"0000:00:02.0"})] == ["0000:00:02.0"]


def test_a_host_without_a_pci_bus_has_no_chips(tmp_path: Path) -> None:
    assert find_chips(tmp_path, used=()) == ()
