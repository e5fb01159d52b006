"""Planted liars: the cpu plugin with one fault each, which the kit has to find and name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plugins.cpu.collectives import GlooCollectives
from plugins.cpu.memory import CpuMemory
from plugins.cpu.operators import CpuOperators
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.device import DeviceProperties
from plugins.sdk.host import HostDevices
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.memory import Buffer, HostBytes
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference import sampling


class PlainMemory(CpuMemory):
    """Leaves weights as they are, for operators that do not take packed ones."""

    def relayout_weight(self, weight: Any, *, operator: str) -> Any:
        return weight


class PlantedBackend(CpuBackend):
    """The cpu plugin with parts replaced, and a report that still declares everything."""

    def __init__(
        self,
        *,
        operators: type[OperatorSet] = CpuOperators,
        memory: type[CpuMemory] = CpuMemory,
        devices: HostDevices | None = None,
        report: Callable[[CapabilityReport], CapabilityReport] = lambda report: report,
    ) -> None:
        super().__init__(CpuOptions())
        self._memory = memory()
        self._operators = operators(self._memory)  # type: ignore[assignment]
        self._devices = devices or self._devices
        self._collectives = None
        self._report = report(replace(self._report, collectives=()))


class WrongResult(CpuOperators):
    """silu without its gate's sigmoid being a sigmoid: one percent off."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up) * 1.01


class WrongRow(CpuOperators):
    """Rotates by the position before."""

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotary(query, key, (positions - 1).clamp(min=0), cos_sin)


class ReadsTooFar(CpuOperators):
    """Attends to one cell more than the sequence has."""

    def attention_decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        longer = (lengths + 1).clamp(max=mask.shape[1])
        return reference.attention_decode(query, kv_cache, page_table, longer, mask, scale)


class Missing(OperatorSet):
    """Covers nothing."""


class NotImplementedYet(CpuOperators):
    """Covers the operator by name only."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        raise NotImplementedError("rms_norm comes in the next release")


class NotANumber(CpuOperators):
    """Forgets eps: a row of zeros becomes 0 / 0."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide / wide.square().mean(dim=-1, keepdim=True).sqrt() * weight.float()).to(x.dtype)


class WritesNextCell(CpuOperators):
    """Writes a cell too many where there is one in the cache."""

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        super().write_kv(key[:1], value[:1], kv_cache, (cells[:1] - 1).clamp(min=0))
        super().write_kv(key, value, kv_cache, cells)


class WritesBehindCache(CpuOperators):
    """A kernel that rounds its last block up: one element behind the cache."""

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        super().write_kv(key, value, kv_cache, cells)
        behind = kv_cache.as_strided((1,), (1,), kv_cache.storage_offset() + kv_cache.numel())
        behind.fill_(0.0)


class ShortAccumulation(CpuOperators):
    """Adds products in blocks of 32, each partial sum rounded to bfloat16."""

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
        for part, rows in zip(torch.split(x, 32, dim=1), torch.split(weight, 32, dim=1), strict=True):
            total = (total.float() + part.float() @ rows.float().T).bfloat16()
        result = total.float() if bias is None else total.float() + bias.float()
        return result.to(x.dtype)


class NonDeterministic(CpuOperators):
    """Every other call differs in a last bit, as atomic additions do."""

    _calls = itertools.count()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = super().add_rms_norm(x, residual, weight, eps)
        if next(self._calls) % 2:
            normed = normed * (1 + torch.finfo(normed.dtype).eps)
        return normed, total


class OverwritesInput(CpuOperators):
    """Works in place to save memory."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        gate = gate_up[..., :half]
        gate.copy_(super().silu_mul(gate_up))
        return gate.clone()


class WrongDtype(CpuOperators):
    """Hands out its accumulator."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x.float(), weight.float(), eps)


class LastOfEquals(CpuOperators):
    """argmax takes the highest id among equals."""

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.shape[1] - 1 - logits.flip(1).argmax(dim=1)


class IgnoresTopK(CpuOperators):
    """A sampler without one of its filters."""

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        return sampling.sample(logits, temperature, torch.zeros_like(top_k), top_p, min_p, uniform)


class ReferenceAsNative(OperatorSet):
    """No liar: the SDK's reference under the name of a plugin, in every dtype of the catalogue."""

    def _why_reference(self, name: str, dtype: str | None = None) -> str:
        return ""


class HeadsBeforeTokens(ReferenceAsNative):
    """No liar either: its caches lie in memory in another order."""

    kv_layout = KvLayout(("page", "kv", "head", "token", "value"))


class HeadsBeforeTokensWritesBehind(HeadsBeforeTokens):
    """The same with a kernel that writes one element too many."""

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        super().write_kv(key, value, kv_cache, cells)
        memory = self.kv_layout.in_memory(kv_cache)
        memory.as_strided((1,), (1,), memory.storage_offset() + memory.numel()).fill_(0.0)


class FlipsABit(CpuMemory):
    """The last bit of every large copy to a device is turned."""

    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        super().copy(source, destination)
        if isinstance(destination, Buffer) and destination.nbytes >= 4096:
            self._bytes_at(destination)[-1] ^= 1


class FreesTwice(CpuMemory):
    """Counts every free, also of what is free already."""

    def free(self, buffer: Buffer) -> None:
        super().free(buffer)
        self._allocated[buffer.device] -= buffer.nbytes


class MixesDevicesUp(CpuMemory):
    """Every device has the memory of device 0 where sizes are equal."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[int, Any] = {}

    def _reserve(self, nbytes: int, device: int | None) -> Any:
        memory = super()._reserve(nbytes, device)
        return self._shared.setdefault(nbytes, memory)


class ListsTooMany(HostDevices):
    """Lists one device more than there is memory and properties for."""

    def list_devices(self) -> Sequence[DeviceProperties]:
        devices = list(super().list_devices())
        return [*devices, replace(devices[-1], index=len(devices))]


class ListsTooFew(HostDevices):
    """Keeps its last device to itself."""

    def list_devices(self) -> Sequence[DeviceProperties]:
        return list(super().list_devices())[:-1]


class NoDevices(HostDevices):
    """A driver without a chip."""

    def list_devices(self) -> Sequence[DeviceProperties]:
        return []


class MadeUpProperties(HostDevices):
    """Defaults in place of what the device says."""

    def properties(self, device: int) -> DeviceProperties:
        return replace(super().properties(device), name="unknown")


class SumsTwice(GlooCollectives):
    """all_reduce counts this rank's own part twice."""

    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        return super().all_reduce(name, tensor, timeout_s=timeout_s) + tensor


def all_native(report: CapabilityReport) -> CapabilityReport:
    """Declares the whole catalogue, whatever there is."""
    native = [OperatorCapability(entry.name, Coverage.NATIVE) for entry in report.operators]
    return replace(report, operators=native)


def with_float16(report: CapabilityReport) -> CapabilityReport:
    """Declares all three floating-point dtypes."""
    return replace(report, compute_dtypes=("float32", "bfloat16", "float16"))
