"""Planted liars: the cpu plugin with one fault each, which the kit has to find and name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshkit.errors import DeadlineExceeded
from plugins.cpu.collectives import GlooCollectives
from plugins.cpu.memory import CpuMemory
from plugins.cpu.operators import CpuOperators
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.collectives import Done, Pending
from plugins.sdk.device import DeviceProperties
from plugins.sdk.host import HostDevices
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.meeting import ranks_missing
from plugins.sdk.memory import Buffer, HostBytes
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference import sampling
from plugins.sdk.reference.fused import COMPOSITIONS, Parts
from plugins.sdk.reference.quantized import dequantize_w4
from plugins.sdk.reference.routing import moe_route


class PlainMemory(CpuMemory):
    """Leaves weights as they are, for operators that do not take packed ones."""

    def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
        return weight


class PlantedBackend(CpuBackend):
    """The cpu plugin with parts replaced, and a report that declares them all."""

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
        self._operators = operators(self._memory)
        self._devices = devices or self._devices
        self._collectives = None
        self._change = report

    def _make_report(self) -> CapabilityReport:
        return self._change(super()._make_report())


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


class TruncatesCells(CpuOperators):
    """Writes to a cache of integers what is left of a value without its fraction, and lets it wrap."""

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        if kv_cache.dtype == torch.int8:
            key, value = (part.to(torch.int64).to(torch.int8).float() for part in (key, value))
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


class WithoutEps(CpuOperators):
    """Leaves eps out of norms, though not so that a row of zeros shows it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, 1e-30)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, residual, weight, 1e-30)


class TurnsTheValue(CpuOperators):
    """Applies rotary positions to value too."""

    def qkv_rotary(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        heads: int,
        kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        made = super().qkv_rotary(x, weight, bias, positions, cos_sin, heads, kv_heads)
        query, key, value = made
        return query, key, reference.rotary(value, value, positions, cos_sin)[0]


class NeverNormalises(CpuOperators):
    """Hands out shares of all experts where shares of the chosen ones are asked for."""

    def moe_route(self, router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
        return moe_route(router_logits, top_k, 0)


class LastExpertOfEquals(CpuOperators):
    """Ties among router logits go to the highest id."""

    def moe_route(self, router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
        weights, ids = moe_route(router_logits.flip(1), top_k, renormalize)
        return weights, router_logits.shape[1] - 1 - ids


class ExpertsOutOfOrder(CpuOperators):
    """Takes a token's expert weights in the order of expert ids."""

    def moe_experts(self, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor) -> Tensor:
        return super().moe_experts(x, gate_up, down, weights, expert_ids.sort(dim=-1).values)


class UnalignedExperts(CpuOperators):
    """Works in blocks of four experts, and the last ones of another number are left out."""

    def moe_experts(self, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor) -> Tensor:
        whole = gate_up.shape[0] // 4 * 4
        return super().moe_experts(x, gate_up, down, weights * (expert_ids < whole), expert_ids)


class AlignedExperts(UnalignedExperts):
    """The same, and its report says so."""

    constraints: ClassVar[Mapping[str, Sequence[str]]] = {"moe_experts": ("E % 4 == 0",)}


class UpFirst(CpuOperators):
    """Takes the first half of gate_up for up."""

    def moe_experts(self, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor) -> Tensor:
        turned = gate_up.roll(gate_up.shape[1] // 2, dims=1)
        return super().moe_experts(x, turned, down, weights, expert_ids)


class ScaleByInput(CpuOperators):
    """Scales the columns of an int8 weight in place of its rows."""

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        inputs = x.shape[1]
        scales = scale.repeat(inputs // len(scale) + 1)[:inputs]
        product: Tensor = x.float() @ (weight.float() * scales).T
        return (product if bias is None else product + bias.float()).to(x.dtype)


class ScaleOff(CpuOperators):
    """One percent off in the scale of int8 weights."""

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        return super().linear_w8a8(x, weight, scale * 1.01, bias)


class Truncates(CpuOperators):
    """Cuts activations off in place of rounding them."""

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        step = (x.float().abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-30)
        whole = (x.float() / step).trunc() * step
        product: Tensor = whole @ weight.float().T * scale
        return (product if bias is None else product + bias.float()).to(x.dtype)


class OneScaleForAll(CpuOperators):
    """Quantises a batch by its largest row."""

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        step = x.float().abs().max() / 127
        product: Tensor = (x.float() / step).round() * step @ weight.float().T * scale
        return (product if bias is None else product + bias.float()).to(x.dtype)


class ZeroPointOff(CpuOperators):
    """Stores zero points less one, as some files do, and does not add it again."""

    def linear_w4a16(
        self, x: Tensor, weight: Any, scale: Any, zero: Any, bias: Tensor | None = None
    ) -> Tensor:
        return super().linear_w4a16(x, weight, scale, (zero.int() - 1).clamp(min=0).to(torch.uint8), bias)


class HighNibbleFirst(CpuOperators):
    """Unpacks the high half of a byte to the even column."""

    def linear_w4a16(
        self, x: Tensor, weight: Any, scale: Any, zero: Any, bias: Tensor | None = None
    ) -> Tensor:
        return super().linear_w4a16(x, (weight << 4) | (weight >> 4), scale, zero, bias)


class GroupScaleOff(CpuOperators):
    """One percent off in the scales of 4-bit weights."""

    def linear_w4a16(
        self, x: Tensor, weight: Any, scale: Any, zero: Any, bias: Tensor | None = None
    ) -> Tensor:
        return super().linear_w4a16(x, weight, scale * 1.01, zero, bias)


class ExpertsShareScales(CpuOperators):
    """Takes the scales of the first expert for all."""

    def moe_experts_w8a8(
        self,
        x: Tensor,
        gate_up: Any,
        gate_up_scale: Any,
        down: Any,
        down_scale: Any,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        scales = gate_up_scale[:1].expand_as(gate_up_scale)
        return super().moe_experts_w8a8(x, gate_up, scales, down, down_scale, weights, expert_ids)


class ExpertsScaleOff(CpuOperators):
    """One percent off in the scales of one of two int8 weights."""

    def moe_experts_w8a8(
        self,
        x: Tensor,
        gate_up: Any,
        gate_up_scale: Any,
        down: Any,
        down_scale: Any,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        scales = down_scale * 1.01
        return super().moe_experts_w8a8(x, gate_up, gate_up_scale, down, scales, weights, expert_ids)


class ExpertsWithoutZeroPoints(CpuOperators):
    """Takes eight for every zero point, as symmetric weights have it."""

    def moe_experts_w4a16(
        self,
        x: Tensor,
        gate_up: Any,
        gate_up_scale: Any,
        gate_up_zero: Any,
        down: Any,
        down_scale: Any,
        down_zero: Any,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        eight = torch.full_like(down_zero, 8)
        first = (gate_up, gate_up_scale, gate_up_zero)
        return super().moe_experts_w4a16(x, *first, down, down_scale, eight, weights, expert_ids)


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


class HalvesAway(CpuOperators):
    """No liar: multiplies by the reciprocal of the step and rounds halves away from zero, as kernels do; a
    product is rounded before its bias is added.
    """

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        largest = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
        levels = x.float() * (127 / largest)
        whole = levels.sign() * (levels.abs() + 0.5).floor()
        sums = (whole.double() @ weight.double().T).float()
        product: Tensor = (sums * (largest / 127 * scale)).to(x.dtype)
        return product if bias is None else product + bias

    def moe_experts_w8a8(
        self,
        x: Tensor,
        gate_up: Any,
        gate_up_scale: Any,
        down: Any,
        down_scale: Any,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        parts: Parts = {"gate_up": self.linear_w8a8, "silu_mul": self.silu_mul, "down": self.linear_w8a8}
        made: Tensor = COMPOSITIONS["moe_experts_w8a8"](parts)(
            x, gate_up, gate_up_scale, down, down_scale, weights, expert_ids
        )
        return made


class WeightsInTheDtype(CpuOperators):
    """No liar: unpacks 4-bit weights to the compute dtype and keeps their scales in it."""

    def linear_w4a16(
        self, x: Tensor, weight: Any, scale: Any, zero: Any, bias: Tensor | None = None
    ) -> Tensor:
        unpacked = dequantize_w4(weight, scale.to(x.dtype), zero).to(x.dtype)
        return torch.nn.functional.linear(x, unpacked, bias)

    def moe_experts_w4a16(
        self,
        x: Tensor,
        gate_up: Any,
        gate_up_scale: Any,
        gate_up_zero: Any,
        down: Any,
        down_scale: Any,
        down_zero: Any,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        parts: Parts = {"gate_up": self.linear_w4a16, "silu_mul": self.silu_mul, "down": self.linear_w4a16}
        first, second = (gate_up, gate_up_scale, gate_up_zero), (down, down_scale, down_zero)
        made: Tensor = COMPOSITIONS["moe_experts_w4a16"](parts)(x, *first, *second, weights, expert_ids)
        return made


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


class WaitsForTheOthers(GlooCollectives):
    """Declares async sums, and its begin_all_reduce waits for the end."""

    def begin_all_reduce(
        self, name: str, tensor: Any, *, algorithm: str = "", timeout_s: float | None = None
    ) -> Pending:
        begun = super().begin_all_reduce(name, tensor, algorithm=algorithm, timeout_s=timeout_s)
        return Done(begun.wait())


class AddsItsOwnFirst(GlooCollectives):
    """Every rank adds in an order of its own: sums are close, and their bits differ among ranks."""

    def begin_all_reduce(
        self, name: str, tensor: Any, *, algorithm: str = "", timeout_s: float | None = None
    ) -> Pending:
        inputs, own = self.all_gather(name, tensor, timeout_s=timeout_s), self._group(name).rank
        order = [own, *(rank for rank in range(len(inputs)) if rank != own)]
        total = inputs[order[0]].clone()
        for rank in order[1:]:
            total += inputs[rank]
        return Done(total)


class BlamesItself(GlooCollectives):
    """Names the wrong rank where one does not come."""

    def begin_all_reduce(
        self, name: str, tensor: Any, *, algorithm: str = "", timeout_s: float | None = None
    ) -> Pending:
        try:
            return Done(super().begin_all_reduce(name, tensor, timeout_s=timeout_s).wait())
        except DeadlineExceeded as error:
            raise ranks_missing(name, 2, [self._group(name).rank]) from error


class SharesOneResult(GlooCollectives):
    """Sums under way at once end up in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: Any = None

    def begin_all_reduce(
        self, name: str, tensor: Any, *, algorithm: str = "", timeout_s: float | None = None
    ) -> Pending:
        total = super().begin_all_reduce(name, tensor, timeout_s=timeout_s).wait()
        if self._memory is None or len(self._memory) < total.numel():
            self._memory = total.new_empty(1 << 20)
        held = self._memory[: total.numel()].view(total.shape)
        return Done(held.copy_(total))


def all_native(report: CapabilityReport) -> CapabilityReport:
    """Declares the whole catalogue, whatever there is."""
    native = [OperatorCapability(entry.name, Coverage.NATIVE) for entry in report.operators]
    return replace(report, operators=native)


def with_float16(report: CapabilityReport) -> CapabilityReport:
    """Declares all three floating-point dtypes."""
    return replace(report, compute_dtypes=("float32", "bfloat16", "float16"))
