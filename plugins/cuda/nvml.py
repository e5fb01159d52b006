"""What the driver's management library says of GPUs, through the package nvidia-ml-py (module pynvml).

CUDA is told which devices to see; NVML sees all that the process may use, so it counts them independently.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshkit.errors import Unavailable


@dataclass(frozen=True)
class MemoryReading:
    """Bytes of one device, and who says so: "nvml" or "torch"."""

    free_bytes: int
    total_bytes: int
    source: str


@dataclass(frozen=True)
class NvmlAbsence:
    """Why there is no NVML to ask."""

    reason: str


class Nvml:
    """An initialised NVML. `module`: pynvml, whose names are used as they are."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def driver_version(self) -> str:
        """For example "570.86.15"."""
        return _text(self._ask(self.module.nvmlSystemGetDriverVersion))

    def count(self, visible: str | None) -> int:
        """GPUs that the driver has for this process; of those named (ids, or UUIDs cut short) those that are
        there.
        """
        count = int(self._ask(self.module.nvmlDeviceGetCount))
        if visible is None:
            return count
        named = [part.strip() for part in visible.split(",")]
        if all(part.isdigit() for part in named):
            return sum(int(part) < count for part in named)
        uuids = [self._uuid(index) for index in range(count)]
        return sum(self._is_there(part, uuids) for part in named)

    def find(self, uuid: str) -> Any | None:
        """The handle of a GPU, or of a part of one, by its UUID without prefix; None: NVML has none such."""
        for prefix in ("GPU-", "MIG-"):
            try:
                return self.module.nvmlDeviceGetHandleByUUID(prefix + uuid)
            except self.module.NVMLError:
                continue
        return None

    def read_memory(self, handle: Any) -> MemoryReading:
        """Raises Unavailable where the device does not answer."""
        memory = self._ask(self.module.nvmlDeviceGetMemoryInfo, handle)
        return MemoryReading(int(memory.free), int(memory.total), "nvml")

    def _uuid(self, index: int) -> str:
        handle = self._ask(self.module.nvmlDeviceGetHandleByIndex, index)
        return _text(self._ask(self.module.nvmlDeviceGetUUID, handle))

    def _is_there(self, name: str, uuids: list[str]) -> bool:
        if name.isdigit():
            return int(name) < len(uuids)
        if name.startswith("MIG-"):
            return self.find(name.removeprefix("MIG-")) is not None
        return any(uuid.startswith(name) for uuid in uuids)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self.module.NVMLError as error:
            raise Unavailable(f"NVML does not answer {function.__name__}: {error}",
                              reason="DEVICE_FAILED") from error  # fmt: skip


def open_nvml(load: Callable[[str], Any] = importlib.import_module) -> Nvml | NvmlAbsence:
    """NVML, initialised for the rest of the process, or why it is not here."""
    try:
        module = load("pynvml")
    except ImportError:
        return NvmlAbsence("the package nvidia-ml-py is not installed")
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return NvmlAbsence(f"NVML does not start: {error}")
    return Nvml(module)


def _text(value: Any) -> str:
    """Old releases of the bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
