"""The framework's reference operators as a back end of their own, to compare chips with. Not a plugin:
nothing can be served by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.host import HostDevices, HostMemory
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import ModelRunner
from plugins.sdk.tensors import HostTensor

T = TypeVar("T")


class ReferenceMemory(HostMemory):
    """The host's memory as torch tensors."""

    def upload(self, value: HostTensor, device: int) -> Any:
        """A tensor of its own memory."""
        return _as_tensor(super().upload(value, device))

    def download(self, tensor: Any) -> HostTensor:
        """From a tensor on the host."""
        plain = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return super().download(plain.numpy())

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return _as_tensor(super()._view(memory, shape, dtype))


class ReferenceBackend(Backend):
    """The host, by the reference alone, in float32."""

    def __init__(self) -> None:
        self._devices = HostDevices(count=1)
        self._memory = ReferenceMemory(count=1)
        self._operators = OperatorSet(self._memory)

    def info(self) -> PluginInfo:
        """The framework itself."""
        return PluginInfo(name="reference", plugin_version="0", framework_version=torch.__version__)

    def capabilities(self) -> CapabilityReport:
        """float32 throughout; every operator is the reference."""
        return CapabilityReport(
            chip="reference",
            operators=self._operators.capabilities(),
            kv_layout=self._operators.kv_layout.name,
        )

    @property
    def devices(self) -> DeviceManager:
        """The host as one device."""
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        """The host's memory."""
        return self._memory

    @property
    def operators(self) -> OperatorSet | None:
        """References only."""
        return self._operators

    @property
    def collectives(self) -> Collectives | None:
        """None: it works alone."""
        return None

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework's parts run models on it."""
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run without gradients."""
        with torch.inference_mode():
            return runnable()

    def synchronize(self) -> None:
        """Work on the host has ended when its call returned."""


def _as_tensor(array: Any) -> torch.Tensor:
    """Over the memory of a numpy array; uint16 are the bits of bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
