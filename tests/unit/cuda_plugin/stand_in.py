"""The plugin over torch on the host: a stand-in for torch.cuda at the seam, real tensors behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plugins.cuda.attention import Attention, TorchAttention
from plugins.cuda.memory import CudaMemory
from plugins.cuda.norms import Norms, TorchNorms
from plugins.cuda.nvml import Nvml, NvmlAbsence
from plugins.cuda.operators import CudaOperators
from plugins.cuda.runtime import Runtime
from plugins.sdk.visibility import Visibility

GIB = 1 << 30
TOTAL, FREE = 24 * GIB, 20 * GIB
NO_NVML = NvmlAbsence("the package nvidia-ml-py is not installed")


class Event:
    """All work before it has ended: the host is never behind."""


@dataclass
class Stream:
    """Counts what is asked of it."""

    device: int
    waited: list[Event] = field(default_factory=list)
    synchronized: int = 0

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        self.synchronized += 1


@dataclass
class StandInCuda:
    """What the plugin asks of torch.cuda, for `count` devices. failing: calls that raise, by name."""

    count: int = 2
    capability: tuple[int, int] = (8, 9)
    architectures: tuple[str, ...] = ("sm_80", "sm_90", "compute_90")
    failing: frozenset[str] = frozenset()
    synchronized: list[int] = field(default_factory=list)

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, device: int) -> Any:
        self._check("get_device_properties")
        major, minor = self.capability
        return SimpleNamespace(
            name="Stand-in L4", major=major, minor=minor, multi_processor_count=58, uuid=f"uuid-{device}"
        )

    def get_device_capability(self, device: int) -> tuple[int, int]:
        del device
        return self.capability

    def get_arch_list(self) -> list[str]:
        return list(self.architectures)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        del device
        self._check("mem_get_info")
        return FREE, TOTAL

    def memory_reserved(self, device: int) -> int:
        return 4096 + device

    def memory_allocated(self, device: int) -> int:
        return 4000 + device

    def empty_cache(self) -> None:
        self._check("empty_cache")

    def synchronize(self, device: int) -> None:
        self._check("synchronize")
        self.synchronized.append(device)

    def device(self, device: int) -> AbstractContextManager[None]:
        del device
        return nullcontext()

    Stream = staticmethod(Stream)

    def _check(self, name: str) -> None:
        if name in self.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@dataclass
class GlooInPlace:
    """A process group of gloo whose work can be polled, as NCCL's: of gloo's reduce_scatter a part runs in
    `wait` only.
    """

    group: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]]) -> Any:
        self.group.reduce_scatter(outputs, inputs).wait()
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)


def gloo_group(*, backend: str, store: Any, rank: int, world_size: int, name: str, timeout: timedelta) -> Any:
    """gloo where the plugin asks for NCCL, without torch's global lists: ranks of a test are threads."""
    assert backend == "nccl"
    return GlooInPlace(torch.distributed.ProcessGroupGloo(store, rank, world_size, timeout))


def runtime_of(
    cuda: StandInCuda | None = None, *, nvml: Nvml | NvmlAbsence = NO_NVML, **changes: Any
) -> Runtime:
    """A runtime whose tensors lie on the host. changes: of its other fields."""
    given: dict[str, Any] = {
        "visibility": Visibility(("CUDA_VISIBLE_DEVICES",), None, {}),
        "libraries": {},
        "required": (),
        "cuda_version": "12.8",
        "nccl_version": "2.27.3",
        "place": lambda index: torch.device("cpu"),
        "pins": False,
        "new_process_group": gloo_group,
        "close_process_group": lambda group: None,
        **changes,
    }
    return Runtime(cuda=cuda or StandInCuda(), nvml=nvml, **given)


def operators_of(attention: Attention | None = None, norms: Norms | None = None) -> CudaOperators:
    """Operators over torch alone, but for what is given."""
    runtime = runtime_of()
    return CudaOperators(CudaMemory(runtime), runtime, attention or TorchAttention(), norms or TorchNorms())


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, rounded to `dtype`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
