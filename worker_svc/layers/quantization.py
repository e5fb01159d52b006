"""Which weights are quantised and how: the framework's policy. The products over them are the plugin's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshkit.errors import InvalidArgument
from meshkit.modelstore.checkpoint_quantization import CheckpointQuantization, check_asked, read_quantization
from plugins.sdk.step_program import PROGRAM_QUANTIZATIONS
from worker_svc.weights.quantized import StoredQuantized
from worker_svc.weights.rounding import round_to

FORMATS = ("", "w8a8", "w4a16", *PROGRAM_QUANTIZATIONS)
_GROUP_SIZES = (128, 64, 32)
"""Columns that share a scale in w4a16: the largest of these that divides a layer's input."""


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
    """Round to nearest, as the weights are loaded; or what a checkpoint has quantised, as it is stored.

    w8a8: int8 with one scale for each output; activations are quantised by row in each product.
    w4a16: 4 bits with a scale and a zero point for each group of 128, 64 or 32 columns.
    Embeddings, the head and routers stay as they are: they are what quality hangs on.
    What step programs alone offer rounds no weight. checkpoint: then nothing else is rounded.
    """

    format: str = ""
    checkpoint: CheckpointQuantization | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidArgument(
                f"quantization is {self.format!r}; supported: {', '.join(FORMATS[1:])}, or leave it out",
                field="quantization",
            )

    @classmethod
    def of_model(cls, asked: str, config: Mapping[str, Any]) -> QuantizationPolicy:
        """Of a model with the completed `config`. asked: a format, "" for none.

        Raises:
            InvalidArgument: (quantization) unknown, or another than the checkpoint has already.
        """
        checkpoint = read_quantization(config)
        check_asked(asked, checkpoint)
        return cls(checkpoint=checkpoint) if checkpoint else cls(asked)

    @property
    def quantizes(self) -> bool:
        """Whether any layer is quantised."""
        return self.checkpoint is not None or self._rounds

    @property
    def kind(self) -> str:
        """What its products are: "w8a8", "w4a16", what step programs alone offer, "" for plain ones."""
        return self.checkpoint.scheme.kind if self.checkpoint else self.format

    @property
    def label(self) -> str:
        """As numeric classes and weight versions name it: its kind, of a checkpoint with the format."""
        return self.checkpoint.label if self.checkpoint else self.format

    def pack(self, weight: Tensor, *, plain: bool = False) -> PackedWeight:
        """weight [out, in] in the form of its layer's operator. A w4a16 layer whose input no group size
        divides stays plain, as the plan shows by its operator.
        """
        rounded = None if plain else self._round(weight)
        return _plain(weight) if rounded is None else pack_stored(rounded)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> PackedWeight:
        """gate_up [e, 2i, k], down [e, k, i] likewise; plain where one of them has to be."""
        if self._rounds:
            halves = [self._round_each(each) for each in (gate_up, down)]
            if all(each is not None for half in halves for each in half):
                return pack_stored_experts(*([each for each in half if each] for half in halves))
        return _plain_experts(gate_up, down)

    @property
    def _rounds(self) -> bool:
        return bool(self.format) and self.format not in PROGRAM_QUANTIZATIONS

    def _round(self, weight: Tensor) -> StoredQuantized | None:
        if not self._rounds:
            return None
        columns = weight.shape[1]
        if self.format == "w8a8":
            return round_to("w8a8", weight, columns)
        group = next((size for size in _GROUP_SIZES if columns % size == 0), 0)
        return round_to("w4a16", weight, group) if group else None

    def _round_each(self, weights: Tensor) -> list[StoredQuantized | None]:
        """By expert; without values, on `meta`, one stands for all."""
        if weights.is_meta:
            return [self._round(weights[0])] * len(weights)
        return [self._round(each) for each in weights.unbind(0)]


def pack_stored(stored: StoredQuantized) -> PackedWeight:
    """Codes as the operator takes them, two of four bits to a byte: the low half is the even column."""
    rows, columns = stored.shape
    if stored.zero is None:
        tensors = {"weight": stored.codes, "scale": stored.scale}
        return PackedWeight("linear_w8a8", {"N": rows, "K": columns}, tensors)
    packed = stored.codes[:, ::2] | stored.codes[:, 1::2] << 4
    return PackedWeight(
        "linear_w4a16",
        {"N": rows, "J": columns // 2, "Q": stored.scale.shape[1]},
        {"weight": packed, "scale": stored.scale, "zero": stored.zero},
    )


def pack_stored_experts(gate_up: Sequence[StoredQuantized], down: Sequence[StoredQuantized]) -> PackedWeight:
    """Of each expert gate_up [2i, k] and down [k, i], all of one kind and group."""
    halves = [[pack_stored(each) for each in half] for half in (gate_up, down)]
    first, second = (half[0].sizes for half in halves)
    sizes = {"E": len(gate_up)}
    if gate_up[0].kind == "w8a8":
        sizes |= {"K": first["K"], "I": second["K"]}
    else:
        sizes |= {"J": first["J"], "Q": first["Q"], "L": second["J"], "U": second["Q"]}
    tensors = {**_by_role("gate_up", halves[0]), **_by_role("down", halves[1])}
    return PackedWeight(f"moe_experts_{gate_up[0].kind}", sizes, tensors)


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
