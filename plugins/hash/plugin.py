"""The hash back end's duties: the host's devices and memory, a runner of its own, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from plugins.hash.options import HashOptions, read_options
from plugins.hash.runner import KV_DTYPE, KV_LAYOUT, NUMERIC_CLASS, HashRunner
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.host import HostDevices, HostMemory
from plugins.sdk.memory import MemoryManager
from plugins.sdk.runner import ModelRunner

VERSION = "0.1.0"
EMULATED_DEVICES = 64
"""More than anybody has processors: a test's fleet is as large as the test wants."""

T = TypeVar("T")


def backend(options: Mapping[str, str]) -> Backend:
    """The factory behind the entry point `hash`.

    Raises:
        InvalidArgument: an unknown or wrong option.
    """
    return HashBackend(read_options(options))


class HashBackend(Backend):
    """An emulated chip on the host. Work ends before a call returns."""

    def __init__(self, options: HashOptions) -> None:
        self._options = options
        self._devices = HostDevices(count=EMULATED_DEVICES)
        self._memory = HostMemory(count=EMULATED_DEVICES)

    def info(self) -> PluginInfo:
        """Name and version; there is no runtime, library or framework under it."""
        return PluginInfo(name="hash", plugin_version=VERSION)

    def capabilities(self) -> CapabilityReport:
        """Emulated, any page size, no operators."""
        return CapabilityReport(
            chip="hash",
            emulated=True,
            emulation_note=(
                "No language model: tokens are SHA-256 digests of the tokens before, kept in the KV pages."
            ),
            compute_dtypes=("uint8",),
            accumulation_dtype="exact",
            kv_cache_dtypes=(KV_DTYPE,),
            kv_layout=KV_LAYOUT,
            preferred_batch_size=256,
            preferred_chunk_tokens=8192,
            numeric_classes=(NUMERIC_CLASS,),
        )

    @property
    def devices(self) -> DeviceManager:
        """The host."""
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        """Host memory."""
        return self._memory

    @property
    def operators(self) -> None:
        """None: there is no arithmetic to cover."""
        return

    @property
    def collectives(self) -> Collectives | None:
        """None: the chip works alone."""
        return None

    def create_runner(self, context: RunnerContext) -> ModelRunner:
        """The hash model."""
        del context
        return HashRunner(self._options)

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run it here and now."""
        return runnable()

    def synchronize(self) -> None:
        """Nothing is ever pending."""
