"""Devices by torch.cuda, with what NVML adds."""

from __future__ import annotations

from plugins.cuda.nvml import Nvml
from plugins.cuda.runtime import Runtime
from plugins.sdk.device import DeviceProperties
from plugins.sdk.torch_devices import TorchDevices, ask_device


class CudaDevices(TorchDevices):
    """Streams and events are CUDA's own. Integrated GPUs, which share the host's memory, are not looked
    for.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.cuda, runtime.visibility)
        self._runtime = runtime

    def properties(self, device: int) -> DeviceProperties:
        """As the driver reports them now; compute units are streaming multiprocessors. The attribute
        `memory_source` says whose numbers the sizes are.
        """
        self._check(device)
        seen = ask_device(device, self._runtime.cuda.get_device_properties)
        memory = self._runtime.read_memory(device)
        return DeviceProperties(
            index=device,
            name=seen.name,
            memory_total_bytes=memory.total_bytes,
            memory_free_bytes=memory.free_bytes,
            compute_units=seen.multi_processor_count,
            attributes={
                "compute_capability": f"{seen.major}.{seen.minor}",
                "uuid": str(seen.uuid),
                "memory_source": memory.source,
                **self._host_attributes(),
                **self._driver_attributes(),
                **self._runtime.choices,
            },
        )

    def _physical_count(self) -> int | None:
        return self._runtime.physical_device_count

    def _driver_attributes(self) -> dict[str, str]:
        nvml = self._runtime.nvml
        return {"driver_version": nvml.driver_version} if isinstance(nvml, Nvml) else {"nvml": nvml.reason}
