"""Linear layers: weights read, joined where one product serves several, quantised by policy, placed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.sdk.operator_table import BoundOperator, OperatorBinder
from worker_svc.layers.quantization import PackedWeight, QuantizationPolicy
from worker_svc.weights.source import WeightSource


class Linear:
    """y = x W^T + b on the chip's operator. `weight_bytes` counts what it holds."""

    def __init__(self, operator: BoundOperator, packed: PackedWeight, bias: Tensor | None) -> None:
        self._call = operator.call
        self._weights = [operator.place(name, tensor) for name, tensor in packed.tensors.items()]
        self._bias = bias
        self.weight_bytes = packed.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in] -> [t, out]."""
        made: Tensor = self._call(x, *self._weights, self._bias)
        return made


class LinearLoader:
    """Makes linear layers from a weight source."""

    def __init__(
        self,
        source: WeightSource,
        operators: OperatorBinder,
        *,
        dtype: torch.dtype,
        device: torch.device,
        policy: QuantizationPolicy,
    ) -> None:
        self._source = source
        self._operators = operators
        self._dtype = dtype
        self._device = device
        self._policy = policy
        self._names = frozenset(source.names())

    @property
    def quantizes(self) -> bool:
        """Whether the policy quantises any layer."""
        return self._policy.quantizes

    def load(self, where: str, *names: str, plain: bool = False) -> Linear:
        """One layer of the matrices `<name>.weight` stacked in that order, with `<name>.bias` where there
        are any. plain: never quantised.
        """
        weight, bias = self.joined(*names)
        packed = self._policy.pack(weight, plain=plain)
        return Linear(self._operators.bind(packed.operator, where, **packed.sizes), packed, bias)

    def joined(self, *names: str) -> tuple[Tensor, Tensor | None]:
        """(weights [sum of outs, in], biases [sum of outs]) of layers that share their input."""
        weight = self._stacked([f"{name}.weight" for name in names])
        if not any(f"{name}.bias" in self._names for name in names):
            return weight, None
        return weight, _join([self._bias(name).to(weight) for name in names])

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is, in the model's dtype on the device."""
        return self._source.read(name, self._dtype).to(self._device)

    def norm_weight(self, name: str, offset: float) -> Tensor:
        """The weight of a norm with `offset` added in float32, then in the model's dtype on the device."""
        if not offset:
            return self.tensor(name)
        return (self._source.read(name, torch.float32) + offset).to(self._dtype).to(self._device)

    def load_experts(self, names: Sequence[tuple[str, str, str]]) -> PackedWeight:
        """The experts' (gate, up, down) matrices in the form of an operator that mixes them."""
        gate_up = self._stacked_experts([(gate, up) for gate, up, _ in names])
        down = self._stacked_experts([(down,) for _, _, down in names])
        return self._policy.pack_experts(gate_up, down)

    def _stacked_experts(self, names: Sequence[Sequence[str]]) -> Tensor:
        """[experts, out, in], read one expert at a time: two copies of all of them would not fit."""
        first, _ = self.joined(*names[0])
        stacked = first.new_empty((len(names), *first.shape))
        if not first.is_meta:
            for index, each in enumerate(names):
                stacked[index] = first if index == 0 else self.joined(*each)[0]
        return stacked

    def _bias(self, name: str) -> Tensor:
        if f"{name}.bias" in self._names:
            return self.tensor(f"{name}.bias")
        return torch.zeros(self._source.shape(f"{name}.weight")[0], device=self._device)

    def _stacked(self, names: Sequence[str]) -> Tensor:
        return _join([self.tensor(name) for name in names])


def _join(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after another. Without values, on `meta`, only the shape is made: torch.cat there imports
    torch's compiler, which takes a second.
    """
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:
        return parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
    return torch.cat(list(parts))
