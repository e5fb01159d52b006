"""Devices of the chip, through the functions of torch.cuda as which it appears."""

from __future__ import annotations

from plugins.kunlun.runtime import CHIP_GENERATION, Runtime
from plugins.sdk.device import DeviceProperties
from plugins.sdk.torch_devices import TorchDevices, ask_device


class KunlunDevices(TorchDevices):
    """Streams and events are the runtime's own."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.cuda, runtime.visibility)
        self._runtime = runtime

    @property
    def shares_host_memory(self) -> bool:
        """Where the chip is emulated."""
        return self._runtime.emulated

    def properties(self, device: int) -> DeviceProperties:
        """As the runtime reports them now; compute units are clusters."""
        self._check(device)
        seen = ask_device(device, self._runtime.cuda.get_device_properties)
        free, total = ask_device(device, self._runtime.cuda.mem_get_info)
        return DeviceProperties(
            index=device,
            name=seen.name,
            memory_total_bytes=total,
            memory_free_bytes=free,
            compute_units=seen.multi_processor_count,
            attributes={
                "generation": CHIP_GENERATION,
                "compute_capability": f"{seen.major}.{seen.minor}",
                **self._host_attributes(),
                **{f"{package}_version": version for package, version in self._runtime.versions.items()},
            },
        )

    def _synchronize(self, device: int) -> None:
        self._runtime.synchronize(device)

    def _physical_count(self) -> int | None:
        return self._runtime.physical_device_count
