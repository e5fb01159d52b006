"""The one seam between the plugin and the vendor's runtime: imports, device strings, synchronisation.

The chip appears as CUDA (device strings `cuda:N`, functions of `torch.cuda`); torch's own `xpu` devices and
its `xccl` backend are another vendor's and are used nowhere here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshkit.errors import FailedPrecondition
from meshkit.telemetry.logging import get_logger
from plugins.kunlun.environment import (
    DEVICE_FILE,
    MODULES,
    VISIBILITY,
    look_for_runtime,
    prepare_environment,
    require_pieces,
)
from plugins.kunlun.options import KunlunOptions
from plugins.kunlun.stacks import check_stack
from plugins.sdk.torch_devices import ask_device
from plugins.sdk.visibility import Visibility, count_device_files

if TYPE_CHECKING:  # importing this file must not load torch: the environment comes first
    import torch
    from torch import Tensor

log = get_logger(__name__)

CHIP_GENERATION = "KL3"
COLLECTIVE_BACKEND = "nccl"
"""torch.distributed's name for XCCL on this chip."""
_EMULATOR = "plugins.kunlun_emulator"

ProcessGroupFactory = Callable[..., Any]


@dataclass
class Runtime:
    """The runtime in use. `cuda`: torch.cuda or its stand-in. `ops`: kunlun_ops. `visible`: ids, None: all.

    `device`: the one that this process works on, from 0.
    """

    cuda: Any
    ops: Any
    versions: Mapping[str, str]
    new_process_group: ProcessGroupFactory
    visible: str | None
    environment: Mapping[str, str]
    emulation_note: str = ""
    device: int = 0
    _device_synchronize_works: bool = field(default=True, repr=False)
    visibility: Visibility = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.visibility = Visibility(VISIBILITY, self.visible, self.environment)

    @property
    def emulated(self) -> bool:
        """Whether this is the emulator."""
        return bool(self.emulation_note)

    @property
    def physical_device_count(self) -> int | None:
        """Chips by the driver's device files; None: none is physical."""
        return None if self.emulated else count_device_files(DEVICE_FILE, self.visible)

    def torch_device(self, index: int) -> torch.device:
        """Where torch keeps tensors of device `index`."""
        import torch  # noqa: PLC0415

        return torch.device("cpu") if self.emulated else torch.device("cuda", index)

    def to_device(self, tensor: Tensor, like: Tensor) -> Tensor:
        """A copy of a host tensor in the memory of the device that holds `like`."""
        return tensor.clone() if self.emulated else tensor.to(like.device, non_blocking=True)

    def zeros(self, nbytes: int, index: int) -> Tensor:
        """Zeroed device memory as uint8. Raises torch.OutOfMemoryError."""
        if self.emulated:
            memory: Tensor = self.cuda.zeros(nbytes, index)
            return memory
        import torch  # noqa: PLC0415

        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device(index))

    def synchronize(self, index: int | None = None) -> None:
        """All work of a device (None: this process's) has ended. Builds are reported on which the device's
        own call fails: there its current stream is waited for, and the log says so once. Raises Unavailable
        where that fails too.
        """
        index = self.device if index is None else index
        if self._device_synchronize_works:
            try:
                self.cuda.synchronize(index)
                return
            except RuntimeError as error:
                self._device_synchronize_works = False
                log.warning("torch.cuda.synchronize fails; waiting for the stream instead", error=str(error))
        ask_device(index, lambda device: self.cuda.current_stream(device).synchronize())

    def require_visible(self) -> None:
        """Settles which visibility variable counts: as many devices have to be seen as were named."""
        self.visibility.require_seen(self.cuda.device_count(), listed_by="xpu-smi")


def open_runtime(options: KunlunOptions) -> Runtime:
    """Load the vendor's runtime, or its emulator where the options ask for it.

    Raises:
        FailedPrecondition: it is not here, does not start, or its versions do not go together.
    """
    if options.emulate:
        # A copy, without the ids that a host keeps for chips of another vendor.
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        visible = prepare_environment(environment, options.visible_devices)
        return _open_emulator(environment, visible)
    require_pieces(look_for_runtime(search_path=os.environ.get("LD_LIBRARY_PATH", "")))
    _refuse_late_start()
    visible = prepare_environment(os.environ, options.visible_devices)
    return _open_vendor(options, visible)


def _open_emulator(environment: Mapping[str, str], visible: str | None) -> Runtime:
    loaded = _import_in_order(f"{_EMULATOR}.")
    cuda = importlib.import_module(f"{_EMULATOR}.cuda").EmulatedCuda(environment)
    runtime = Runtime(
        cuda=cuda,
        ops=loaded["kunlun_ops"],
        versions={name: module.__version__ for name, module in loaded.items()},
        new_process_group=importlib.import_module(f"{_EMULATOR}.process_group").new_process_group,
        visible=visible,
        environment=environment,
        emulation_note=importlib.import_module(_EMULATOR).NOTE,
    )
    _check_chip(loaded["torch_xmlir"], cuda)
    runtime.require_visible()
    return runtime


def _open_vendor(options: KunlunOptions, visible: str | None) -> Runtime:
    loaded = _import_in_order("")
    # After the vendor's modules: it imports torch.
    from plugins.sdk.process_group import new_process_group  # noqa: PLC0415

    torch = importlib.import_module("torch")
    versions = {name: _version_of(name, module) for name, module in loaded.items()}
    if options.check_versions:
        check_stack({"torch": torch.__version__, **versions})
    _check_chip(loaded["torch_xmlir"], torch.cuda)
    runtime = Runtime(
        cuda=torch.cuda,
        ops=loaded["kunlun_ops"],
        versions=versions,
        new_process_group=new_process_group,
        visible=visible,
        environment=os.environ,
    )
    runtime.require_visible()
    return runtime


def _import_in_order(prefix: str) -> dict[str, ModuleType]:
    """torch, then the vendor's modules: each links against symbols of the one before."""
    try:
        importlib.import_module("torch")
        return {name: importlib.import_module(prefix + name) for name in MODULES}
    except (ImportError, OSError) as error:
        raise FailedPrecondition(
            f"the Kunlun runtime is here but does not load: {error}. Check that LD_LIBRARY_PATH leads to "
            "/usr/local/xre/so and /usr/local/xccl/so and that the packages are of one release",
            field="backend",
            reason="RUNTIME_BROKEN",
        ) from error


def _refuse_late_start() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise FailedPrecondition(
            "torch.cuda was used in this process before the kunlun plugin: visibility and settings of the "
            "runtime would have no effect; start the plugin in a process of its own",
            field="backend",
            reason="RUNTIME_STARTED",
        )


def _check_chip(torch_xmlir: Any, cuda: Any) -> None:
    generation = torch_xmlir.get_xpu_version() if torch_xmlir.xpu.is_available() else ""
    if generation != CHIP_GENERATION or not cuda.is_available():
        raise FailedPrecondition(
            f"torch_xmlir sees chip {generation or 'none'!r} and torch.cuda.is_available() is "
            f"{cuda.is_available()}; this plugin is for {CHIP_GENERATION}. Check xpu-smi, /dev/xpu* and "
            f"{' and '.join(VISIBILITY)}",
            field="backend",
            reason="NO_DEVICE",
        )


def _version_of(name: str, module: ModuleType) -> str:
    """By the package's metadata, else by the module itself; "" where neither says."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", ""))
