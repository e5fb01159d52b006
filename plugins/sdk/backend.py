"""What a plugin's factory returns: one chip behind four duties. No torch."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.drift import ContractClass
from plugins.sdk.memory import MemoryManager
from plugins.sdk.runner import ModelRunner
from plugins.sdk.step_program import DecoderShape, DecoderWeights, StepProgram
from plugins.sdk.versions import CONTRACT_VERSION

if TYPE_CHECKING:  # its signatures hold torch tensors
    from plugins.sdk.operators import OperatorSet

T = TypeVar("T")


@dataclass(frozen=True)
class PluginInfo:
    """Who a plugin is, and the ranges that it was built for; a version outside its range is refused at load.

    Empty versions: the plugin has no such part. Ranges are clauses such as ">=2.5,<3"; empty: every version.
    """

    name: str
    plugin_version: str
    contract_version: str = CONTRACT_VERSION
    runtime_version: str = ""
    collective_library_version: str = ""
    framework_version: str = ""
    contract_range: str = ">=1.0,<2"
    runtime_range: str = ""
    collective_library_range: str = ""
    framework_range: str = ""


@dataclass(frozen=True)
class RunnerContext:
    """What a runner may need to know when it is made. `device` counts from 0."""

    device: int = 0
    cache_dir: str = ""


class Backend(ContractClass, contract=True):
    """One chip. Made by a factory `(options: Mapping[str, str]) -> Backend` that raises MeshError with the
    cause where it cannot run here; never falls back to another chip.
    """

    @abc.abstractmethod
    def info(self) -> PluginInfo:
        """Name and versions."""

    @abc.abstractmethod
    def capabilities(self) -> CapabilityReport:
        """The frozen report: equal at every call."""

    @property
    @abc.abstractmethod
    def devices(self) -> DeviceManager:
        """Device management."""

    @property
    @abc.abstractmethod
    def memory(self) -> MemoryManager:
        """Memory."""

    @property
    @abc.abstractmethod
    def operators(self) -> OperatorSet | None:
        """Operators; None where the plugin brings a runner of its own."""

    @property
    @abc.abstractmethod
    def collectives(self) -> Collectives | None:
        """Collectives; None where the chip works alone."""

    @abc.abstractmethod
    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """The plugin's own runner; None: the framework's runner on `operators`."""

    def create_step_program(
        self, shape: DecoderShape, weights: DecoderWeights, *, quantization: str = ""
    ) -> StepProgram:
        """The model as one program; called only where the plan chose one of the report's `step_programs`.

        quantization: one of that entry's `quantizations`.

        Raises:
            MemoryError: the weights do not fit.
        """
        raise NotImplementedError(f"{type(self).__name__} reports step programs and creates none")

    @abc.abstractmethod
    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run work on the chip under its settings (threads, streams, no gradients) and return its result."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Return when all work of this process on the chip has ended."""
