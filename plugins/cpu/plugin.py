"""The chip "cpu" behind the contract's four duties."""

from __future__ import annotations

import torch

from meshkit.errors import FailedPrecondition
from plugins.cpu.collectives import GlooCollectives, gloo_is_available
from plugins.cpu.memory import CpuMemory, onednn_is_available
from plugins.cpu.native.loading import LoadedKernel, load_kernel
from plugins.cpu.operators import CpuOperators
from plugins.cpu.options import CpuOptions
from plugins.cpu.step_program import CpuStepProgram, describe_program
from plugins.sdk.backend import PluginInfo
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.host import HostDevices
from plugins.sdk.operator_backend import OperatorBackend
from plugins.sdk.process_group import PRIMITIVES
from plugins.sdk.step_program import DecoderShape, DecoderWeights, StepProgram
from plugins.sdk.versions import installed_version

DTYPES = ("float32", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
STEP_WINDOW_MS = 30
"""A message over all hops takes about 1.2 ms of the processors that the steps are computed on."""


class CpuBackend(OperatorBackend):
    """The host. Sets torch's thread count where asked, which is a setting of the process."""

    def __init__(self, options: CpuOptions) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        devices = HostDevices(
            count=options.devices,
            threads=torch.get_num_threads(),
            attributes={
                "instruction_set": torch.backends.cpu.get_cpu_capability(),
                "onednn": str(onednn_is_available()).lower(),
            },
        )
        self._kernel = _find_kernel(options.kernel)
        self._instruction_set = "" if options.kernel == "auto" else options.kernel
        self._overlap_rows = options.communication.overlap_rows or 0
        memory = CpuMemory(count=options.devices)
        super().__init__(
            devices=devices,
            memory=memory,
            operators=CpuOperators(memory),
            collectives=GlooCollectives(border=options.communication.border) if gloo_is_available() else None,
        )

    def info(self) -> PluginInfo:
        """Built and tested with torch 2.5 and later."""
        return PluginInfo(
            name="cpu",
            plugin_version=installed_version("chipmesh"),
            collective_library_version=self._collectives.library if self._collectives else "",
            framework_version=torch.__version__,
            framework_range=">=2.5,<3",
        )

    def create_step_program(
        self, shape: DecoderShape, weights: DecoderWeights, *, quantization: str = ""
    ) -> StepProgram:
        """The native kernel, on as many threads as torch has."""
        assert self._kernel.library is not None, "the report has no program without a library"
        return CpuStepProgram(
            self._kernel.library,
            shape,
            weights,
            threads=torch.get_num_threads(),
            instruction_set=self._instruction_set,
            quantization=quantization,
        )

    def _make_report(self) -> CapabilityReport:
        return CapabilityReport(
            chip="cpu",
            operators=self._operators.capabilities(),
            compute_dtypes=DTYPES,
            accumulation_dtype="float32",
            kv_cache_dtypes=KV_DTYPES,
            kv_layout=self._operators.kv_layout.name,
            preferred_chunk_tokens=128,
            preferred_batch_size=64,
            preferred_step_window_ms=STEP_WINDOW_MS,
            numeric_classes=DTYPES,
            collectives=PRIMITIVES if self._collectives else (),
            overlap_rows=self._overlap_rows,
            step_programs=(
                describe_program(
                    self._kernel.library,
                    self._kernel.problem,
                    instruction_set=self._instruction_set,
                    threads=torch.get_num_threads(),
                ),
            ),
        )


def _find_kernel(option: str) -> LoadedKernel:
    """Raises FailedPrecondition (backend_options.kernel) where a certain instruction set was asked for and
    cannot be had.
    """
    if option == "off":
        return LoadedKernel(None, problem="the step kernel is off (backend option kernel)")
    kernel = load_kernel()
    if option == "auto":
        return kernel
    if kernel.library is None or not kernel.library.find_kernels(option.encode()):
        raise FailedPrecondition(
            f"backend option kernel is {option!r}, which does not run here: "
            f"{kernel.problem or 'the processor or the compiler lacks it'}; use auto",
            field="backend_options.kernel",
        )
    return kernel
