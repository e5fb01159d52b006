"""A backend assembled from its parts: what every plugin would write alike. No torch."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.memory import MemoryManager
from plugins.sdk.runner import ModelRunner

if TYPE_CHECKING:  # its signatures hold torch tensors
    from plugins.sdk.operators import OperatorSet

T = TypeVar("T")


class AssembledBackend(Backend):
    """A plugin brings `info` and `_make_report`, and overrides what its chip does otherwise: work runs here
    and now, and has ended when its call returned. For plugins that cover operators there is more in
    plugins.sdk.operator_backend.
    """

    def __init__(
        self,
        *,
        devices: DeviceManager,
        memory: MemoryManager,
        operators: OperatorSet | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self._devices = devices
        self._memory = memory
        self._operators = operators
        self._collectives = collectives
        self._kept_report: CapabilityReport | None = None

    @abc.abstractmethod
    def _make_report(self) -> CapabilityReport:
        """What this chip can do; called once."""

    def capabilities(self) -> CapabilityReport:
        """Made at the first call, which is at load; the same from then on."""
        if self._kept_report is None:
            self._kept_report = self._make_report()
        return self._kept_report

    @property
    def devices(self) -> DeviceManager:
        """As given."""
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        """As given."""
        return self._memory

    @property
    def operators(self) -> OperatorSet | None:
        """As given."""
        return self._operators

    @property
    def collectives(self) -> Collectives | None:
        """As given."""
        return self._collectives

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework's runner serves."""
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run it."""
        return runnable()

    def synchronize(self) -> None:
        """Nothing is ever pending."""
