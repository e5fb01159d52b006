"""The one seam between the plugin and NVIDIA's runtime: its start, its devices, kernel libraries.

Everything that only a GPU can answer goes through `Runtime`; tests put stand-ins there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshkit.errors import FailedPrecondition
from meshkit.telemetry.logging import get_logger
from plugins.cuda.environment import (
    DEVICE_FILES,
    VISIBILITY,
    look_for_driver,
    no_device,
    prepare_environment,
)
from plugins.cuda.nvml import MemoryReading, Nvml, NvmlAbsence, open_nvml
from plugins.cuda.options import KERNEL_LIBRARIES, CudaOptions
from plugins.sdk.torch_devices import ask_device
from plugins.sdk.visibility import Visibility, count_device_files

if TYPE_CHECKING:  # importing this file must not load torch: the environment comes first
    import torch

log = get_logger(__name__)

Capability = tuple[int, int]
"""Compute capability, (major, minor)."""
_LIBRARIES_FROM: Capability = (8, 0)
"""Ampere. Older GPUs have no bfloat16 units, and both libraries drop them release by release."""


@dataclass
class Runtime:
    """The runtime in use.

    cuda: torch.cuda, or its stand-in. libraries: kernel libraries that were imported, by name; required:
    those that the options insist on. cuda_version: that torch was built with; nccl_version: "" where it was
    built without. place: where torch keeps tensors of a device. pins: whether host memory can be pinned.
    device: the one that this process works on, from 0; settled: whether a runner was made for it. choices:
    what was chosen at start, as device attributes show it.
    """

    cuda: Any
    visibility: Visibility
    nvml: Nvml | NvmlAbsence
    libraries: Mapping[str, Any]
    required: tuple[str, ...]
    cuda_version: str
    nccl_version: str
    place: Callable[[int], torch.device]
    new_process_group: Callable[..., Any]
    close_process_group: Callable[[Any], None]
    pins: bool = True
    device: int = 0
    settled: bool = False
    choices: dict[str, str] = field(default_factory=dict)

    @property
    def capability(self) -> Capability:
        """The least of all visible devices: what runs on each of them."""
        return min(self._capability_of(index) for index in range(self.device_count))

    @property
    def device_count(self) -> int:
        """Visible devices."""
        return int(self.cuda.device_count())

    @property
    def physical_device_count(self) -> int | None:
        """GPUs that the driver has for this process, by NVML or else by its device files; None: not known."""
        if isinstance(self.nvml, Nvml):
            return self.nvml.count(self.visibility.in_effect)
        return count_device_files(DEVICE_FILES, self.visibility.in_effect)

    def read_memory(self, index: int) -> MemoryReading:
        """By NVML where it knows the device, else by torch."""
        if isinstance(self.nvml, Nvml) and (handle := self.nvml_handle(index)) is not None:
            return self.nvml.read_memory(handle)
        free, total = ask_device(index, self.cuda.mem_get_info)
        return MemoryReading(int(free), int(total), "torch")

    def nvml_handle(self, index: int) -> Any | None:
        """NVML's handle of a visible device, found by the UUID that torch reports; None: there is none."""
        if not isinstance(self.nvml, Nvml):
            return None
        return self.nvml.find(str(ask_device(index, self.cuda.get_device_properties).uuid))

    def synchronize(self, index: int | None = None) -> None:
        """All work of a device (None: this process's) has ended. Raises Unavailable where it failed."""
        ask_device(self.device if index is None else index, self.cuda.synchronize)

    def _capability_of(self, index: int) -> Capability:
        major, minor = ask_device(index, self.cuda.get_device_capability)
        return int(major), int(minor)


@dataclass
class _Start:
    """How CUDA was started in this process; a process has one start."""

    visible: str | None = None
    ours: bool = False


_start = _Start()


def open_runtime(options: CudaOptions) -> Runtime:
    """Start CUDA under the visibility that the options, or else the environment, ask for.

    Raises:
        FailedPrecondition: no usable GPU (NO_DEVICE), other GPUs than named (VISIBILITY), torch.cuda in use
            already (RUNTIME_STARTED), a GPU that this torch has no code for (DEVICE_UNSUPPORTED), or a
            required library that does not import (LIBRARY_ABSENT).
    """
    wanted = options.visible_devices if options.visible_devices is not None else os.environ.get(VISIBILITY)
    _refuse_late_start(wanted)
    torch: Any = importlib.import_module("torch")
    _require_cuda_build(torch, wanted)
    with _restored_on_failure():
        visible = prepare_environment(os.environ, options.visible_devices)
        _require_device(torch, visible)
        _start.visible, _start.ours = visible, True
        runtime = _make_runtime(torch, options, Visibility((VISIBILITY,), visible, os.environ))
        runtime.visibility.require_seen(runtime.device_count, listed_by="nvidia-smi -L")
        _check_architectures(runtime)
    settle_precision(torch)
    runtime.libraries = load_libraries(options.kernel_libraries, runtime.capability)
    if isinstance(runtime.nvml, NvmlAbsence):
        log.info("NVML is not used; torch's own numbers are reported", reason=runtime.nvml.reason)
    return runtime


def _make_runtime(torch: Any, options: CudaOptions, visibility: Visibility) -> Runtime:
    # It imports torch, which reads its environment then.
    process_group: Any = importlib.import_module("plugins.sdk.process_group")
    return Runtime(
        cuda=torch.cuda,
        visibility=visibility,
        nvml=open_nvml(),
        libraries={},
        required=options.kernel_libraries or (),
        cuda_version=torch.version.cuda,
        nccl_version=_nccl_version(torch),
        place=lambda index: torch.device("cuda", index),
        new_process_group=process_group.new_process_group,
        close_process_group=process_group.close_process_group,
    )


def settle_precision(torch: Any) -> None:
    """float32 means float32 and sums are float32, whatever the process had set: no TF32 in products, and no
    partial sums of bfloat16 or float16 in split products. Settings of the process; they stay.
    """
    torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def load_libraries(
    wanted: tuple[str, ...] | None,
    capability: Capability,
    *,
    load: Callable[[str], Any] = importlib.import_module,
) -> dict[str, Any]:
    """Kernel libraries, imported. wanted: as CudaOptions has them, None: those that import.

    Raises:
        FailedPrecondition: one that is wanted does not import, or the GPUs are too old for it.
    """
    loaded: dict[str, Any] = {}
    for name in KERNEL_LIBRARIES if wanted is None else wanted:
        problem = ""
        if capability < _LIBRARIES_FROM:
            problem = f"it takes compute capability {_dotted(_LIBRARIES_FROM)}, here is {_dotted(capability)}"
        else:
            try:
                loaded[name] = load(name)
            except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library is missing
                problem = f"{type(error).__name__}: {error}"
        if problem and wanted is not None:
            raise FailedPrecondition(
                f"backend option kernel_libraries names {name}, which cannot be used: {problem}. Install it, "
                "or leave it out of the option",
                field="backend_options.kernel_libraries",
                reason="LIBRARY_ABSENT",
            )
        if problem:
            log.info("kernel library is not used", library=name, reason=problem)
    return loaded


def _refuse_late_start(wanted: str | None) -> None:
    """Opening the plugin again in its own process is fine, with the same devices."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if not _start.ours:
        raise FailedPrecondition(
            "torch.cuda was used in this process before the cuda plugin: visibility and settings would have "
            "no effect; start the plugin in a process of its own",
            field="backend",
            reason="RUNTIME_STARTED",
        )
    if wanted != _start.visible:
        raise FailedPrecondition(
            f"CUDA runs in this process with devices {_start.visible or 'all'}; {wanted or 'all'} would have "
            "no effect; start the plugin in a process of its own",
            field="backend_options.visible_devices",
            reason="RUNTIME_STARTED",
        )


def _require_cuda_build(torch: Any, visible: str | None) -> None:
    if torch.version.cuda is None:
        cause = "this torch is built without CUDA"
        raise no_device(cause, _describe_build(torch), look_for_driver(visible))


def _require_device(torch: Any, visible: str | None) -> None:
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        cause = "torch is built with CUDA, but sees no device"
        raise no_device(cause, _describe_build(torch), look_for_driver(visible))


def _nccl_version(torch: Any) -> str:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _describe_build(torch: Any) -> str:
    return f"{torch.__version__} for CUDA {torch.version.cuda or 'none'}"


@contextmanager
def _restored_on_failure() -> Iterator[None]:
    """A chip that is not here leaves no variable behind: another plugin may be chosen next."""
    before = dict(os.environ)
    try:
        yield
    except BaseException:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        raise


def _check_architectures(runtime: Runtime) -> None:
    """torch carries machine code for some architectures, and code for later ones to be compiled; without
    either every kernel fails.
    """
    known = list(runtime.cuda.get_arch_list())
    for index in range(runtime.device_count):
        major, minor = ask_device(index, runtime.cuda.get_device_capability)
        if not any(_runs(entry, major, minor) for entry in known):
            raise FailedPrecondition(
                f"device {index} has compute capability {major}.{minor}; this torch is built for "
                f"{', '.join(known)}. Install a torch that is built for it",
                field="backend",
                reason="DEVICE_UNSUPPORTED",
            )


def _runs(entry: str, major: int, minor: int) -> bool:
    """Whether code of `entry` runs there: sm_XY on the same major version from minor Y on, compute_XY on all
    from X.Y on. A letter at the end (sm_90a) binds it to exactly that architecture.
    """
    kind, _, number = entry.partition("_")
    exact = not number.isdigit()
    digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
    built = (int(digits[:-1]), int(digits[-1]))
    if exact:
        return built == (major, minor)
    if kind == "compute":
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
