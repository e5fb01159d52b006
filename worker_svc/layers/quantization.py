"""Which weights are quantised and how: the framework's policy. The products over them are the plugin's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.errors import InvalidArgument
from plugins.sdk.reference.quantized import quantize_rows
from plugins.sdk.step_program import PROGRAM_QUANTIZATIONS

FORMATS = ("", "w8a8", "w4a16", *PROGRAM_QUANTIZATIONS)
_GROUP_SIZES = (128, 64, 32)
"""Columns that share a scale in w4a16: the largest of these that divides a layer's input."""
_LEVELS_4BIT = 15


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the form of an operator: its name, its sizes by the catalogue's symbols, and its weight
    parameters in order.
    """

    operator: str
    sizes: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class QuantizationPolicy:
    """Round to nearest, as the weights are loaded.

    w8a8: int8 with one scale for each output; activations are quantised by row in each product.
    w4a16: 4 bits with a scale and a zero point for each group of 128, 64 or 32 columns.
    Embeddings, the head and routers stay as they are: they are what quality hangs on.
    What step programs alone offer rounds no weight.
    """

    format: str = ""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidArgument(
                f"quantization is {self.format!r}; supported: {', '.join(FORMATS[1:])}, or leave it out",
                field="quantization",
            )

    @property
    def quantizes(self) -> bool:
        """Whether any layer is quantised."""
        return bool(self.format) and self.format not in PROGRAM_QUANTIZATIONS

    def pack(self, weight: Tensor, *, plain: bool = False) -> PackedWeight:
        """weight [out, in] in the form of its layer's operator. A w4a16 layer whose input no group size
        divides stays plain, as the plan shows by its operator.
        """
        if plain or not self.quantizes:
            return _plain(weight)
        if self.format == "w8a8":
            return _w8a8(weight)
        group = next((size for size in _GROUP_SIZES if weight.shape[1] % size == 0), 0)
        return _w4a16(weight, group) if group else _plain(weight)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> PackedWeight:
        """gate_up [e, 2i, k], down [e, k, i] likewise; plain where one of them has to be."""
        if not self.quantizes:
            return _plain_experts(gate_up, down)
        halves = [self._pack_each(each) for each in (gate_up, down)]
        if any(half[0].operator == "linear" for half in halves):
            return _plain_experts(gate_up, down)
        first, second = (half[0].sizes for half in halves)
        sizes = {"E": gate_up.shape[0]}
        if self.format == "w8a8":
            sizes |= {"K": first["K"], "I": second["K"]}
        else:
            sizes |= {"J": first["J"], "Q": first["Q"], "L": second["J"], "U": second["Q"]}
        tensors = {**_by_role("gate_up", halves[0]), **_by_role("down", halves[1])}
        return PackedWeight(f"moe_experts_{self.format}", sizes, tensors)

    def _pack_each(self, weights: Tensor) -> list[PackedWeight]:
        """By expert; without values, on `meta`, one stands for all."""
        if weights.is_meta:
            return [self.pack(weights[0])] * len(weights)
        return [self.pack(each) for each in weights.unbind(0)]


def _plain_experts(gate_up: Tensor, down: Tensor) -> PackedWeight:
    experts, hidden, inner = down.shape
    sizes = {"E": experts, "K": hidden, "I": inner}
    return PackedWeight("moe_experts", sizes, {"gate_up": gate_up, "down": down})


def _by_role(role: str, experts: Sequence[PackedWeight]) -> dict[str, Tensor]:
    """The operator's parameters: a role's own weight, then what its products have beside it."""
    return {
        role if name == "weight" else f"{role}_{name}": _stack([each.tensors[name] for each in experts])
        for name in experts[0].tensors
    }


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """As torch.stack, which imports torch's compiler on `meta`."""
    stacked = parts[0].new_empty((len(parts), *parts[0].shape))
    if not stacked.is_meta:
        torch.stack(list(parts), out=stacked)
    return stacked


def _plain(weight: Tensor) -> PackedWeight:
    return PackedWeight("linear", {"N": weight.shape[0], "K": weight.shape[1]}, {"weight": weight})


def _w8a8(weight: Tensor) -> PackedWeight:
    values, scale = quantize_rows(weight)
    return PackedWeight(
        "linear_w8a8",
        {"N": weight.shape[0], "K": weight.shape[1]},
        {"weight": values, "scale": scale},
    )


def _w4a16(weight: Tensor, group: int) -> PackedWeight:
    """The range of each group, zero included, over 16 levels."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group, group)
    low, high = grouped.amin(dim=-1).clamp(max=0.0), grouped.amax(dim=-1).clamp(min=0.0)
    scale = (high - low) / _LEVELS_4BIT
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-low / scale).round()
    levels = (grouped / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, _LEVELS_4BIT)
    pairs = levels.to(torch.uint8).view(rows, columns // 2, 2)
    return PackedWeight(
        "linear_w4a16",
        {"N": rows, "J": columns // 2, "Q": columns // group},
        {"weight": pairs[..., 0] | pairs[..., 1] << 4, "scale": scale, "zero": zero.to(torch.uint8)},
    )
