"""The hash back end's duties: the host's devices and memory, a runner of its own, nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from plugins.hash.options import HashOptions, read_options
from plugins.hash.runner import KV_DTYPE, KV_LAYOUT, NUMERIC_CLASS, HashRunner
from plugins.sdk.assembled import AssembledBackend
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.host import HostDevices, HostMemory
from plugins.sdk.runner import ModelRunner

VERSION = "0.1.0"
EMULATED_DEVICES = 64
"""More than anybody has processors: a test's fleet is as large as the test wants."""


def backend(options: Mapping[str, str]) -> Backend:
    """The factory behind the entry point `hash`.

    Raises:
        InvalidArgument: an unknown or wrong option.
    """
    return HashBackend(read_options(options))


class HashBackend(AssembledBackend):
    """An emulated chip on the host. Work ends before a call returns."""

    def __init__(self, options: HashOptions) -> None:
        super().__init__(
            devices=HostDevices(count=EMULATED_DEVICES), memory=HostMemory(count=EMULATED_DEVICES)
        )
        self._options = options

    def info(self) -> PluginInfo:
        """Name and version; there is no runtime, library or framework under it."""
        return PluginInfo(name="hash", plugin_version=VERSION)

    def create_runner(self, context: RunnerContext) -> ModelRunner:
        """The hash model."""
        del context
        return HashRunner(self._options)

    def _make_report(self) -> CapabilityReport:
        # Any page size, no operators.
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
            preferred_step_window_ms=20,
            numeric_classes=(NUMERIC_CLASS,),
        )
