"""A backend whose operators the framework's runner serves models with: the usual plugin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from plugins.sdk.assembled import AssembledBackend
from plugins.sdk.backend import RunnerContext
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import ModelRunner

T = TypeVar("T")


class OperatorBackend(AssembledBackend):
    """A plugin brings `info` and `_make_report`, and `_on_device` where a device has to be selected."""

    _operators: OperatorSet

    def __init__(
        self,
        *,
        devices: DeviceManager,
        memory: MemoryManager,
        operators: OperatorSet,
        collectives: Collectives | None = None,
    ) -> None:
        super().__init__(devices=devices, memory=memory, operators=operators, collectives=collectives)
        self._device = 0

    def _on_device(self, device: int) -> AbstractContextManager[object]:
        """Within it, work goes to that device (and a stream of yours). Default: nothing to select."""
        return nullcontext()

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework's runner serves, on this device. Raises NotFound for an unknown one."""
        self._devices.properties(context.device)
        self._device = context.device
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run on the runner's device, without gradients."""
        with self._on_device(self._device), torch.inference_mode():
            return runnable()

    def synchronize(self) -> None:
        """The runner's device."""
        self._devices.synchronize(self._device)
