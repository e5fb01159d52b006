"""Linear layers: weights read, joined where one product serves several, quantised by policy, placed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshkit.errors import InvalidArgument
from meshkit.modelstore.problems import model_path_error
from plugins.sdk.operator_table import BoundOperator, OperatorBinder
from worker_svc.layers.quantization import (
    PackedWeight,
    QuantizationPolicy,
    pack_stored,
    pack_stored_experts,
)
from worker_svc.weights.quantized import StoredQuantized
from worker_svc.weights.source import WeightSource


class Product:
    """One product with a weight. order: int64 [in], the columns of x as the weight has them; None: as x has
    them.
    """

    def __init__(
        self, operator: BoundOperator, packed: PackedWeight, bias: Tensor | None, order: Tensor | None = None
    ) -> None:
        self._call = operator.call
        self._weights = [operator.place(name, tensor) for name, tensor in packed.tensors.items()]
        self._bias = bias
        self._order = order
        beside = [each for each in (bias, order) if each is not None]
        self.weight_bytes = packed.nbytes + sum(each.nbytes for each in beside)

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in] -> [t, out]."""
        columns = x if self._order is None else x.index_select(1, self._order)
        made: Tensor = self._call(columns, *self._weights, self._bias)
        return made


class Linear:
    """y = x W^T + b on the chip's operators: one product, or several side by side where a checkpoint stores
    their matrices differently. `weight_bytes` counts what it holds.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products
        self._only = products[0] if len(products) == 1 else None
        self.weight_bytes = sum(each.weight_bytes for each in products)

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in] -> [t, out]."""
        if self._only is not None:
            return self._only(x)
        return torch.cat([each(x) for each in self._products], dim=1)


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
        if plain or self._policy.checkpoint is None:
            weight, bias = self.joined(*names)
            return Linear([self._product(where, self._policy.pack(weight, plain=plain), bias)])
        return Linear([self._stored_product(where, run) for run in self._runs(names)])

    def joined(self, *names: str) -> tuple[Tensor, Tensor | None]:
        """(weights [sum of outs, in], biases [sum of outs]) of layers that share their input."""
        weight = self._stacked([f"{name}.weight" for name in names])
        return weight, self._biases(names)

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is, in the model's dtype on the device."""
        return self._source.read(name, self._dtype).to(self._device)

    def norm_weight(self, name: str, offset: float) -> Tensor:
        """The weight of a norm with `offset` added in float32, then in the model's dtype on the device."""
        if not offset:
            return self.tensor(name)
        return (self._source.read(name, torch.float32) + offset).to(self._dtype).to(self._device)

    def load_experts(self, names: Sequence[tuple[str, str, str]]) -> PackedWeight:
        """The experts' (gate, up, down) matrices in the form of an operator that mixes them.

        Raises:
            InvalidArgument: (model_path) a checkpoint that stores them in several ways, or columns in the
                order of activations.
        """
        if self._policy.checkpoint is not None:
            stored = self._stored_experts(names)
            if stored is not None:
                return pack_stored_experts([first for first, _ in stored], [second for _, second in stored])
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

    def _product(
        self, where: str, packed: PackedWeight, bias: Tensor | None, order: Tensor | None = None
    ) -> Product:
        return Product(self._operators.bind(packed.operator, where, **packed.sizes), packed, bias, order)

    def _stored_product(self, where: str, run: Sequence[tuple[str, StoredQuantized | None]]) -> Product:
        names = [name for name, _ in run]
        parts = [stored for _, stored in run if stored is not None]
        if not parts:
            weight, bias = self.joined(*names)
            return self._product(where, self._policy.pack(weight, plain=True), bias)
        whole = _join_stored([part.to(self._device) for part in parts])
        return self._product(where, pack_stored(whole), self._biases(names), whole.order)

    def _runs(self, names: Sequence[str]) -> list[list[tuple[str, StoredQuantized | None]]]:
        """Neighbours that one product serves: plain ones, or of one kind with columns as x has them."""
        runs: list[list[tuple[str, StoredQuantized | None]]] = []
        for name in names:
            stored = self._source.quantized(f"{name}.weight")
            if runs and _are_joinable(runs[-1][-1][1], stored):
                runs[-1].append((name, stored))
            else:
                runs.append([(name, stored)])
        return runs

    def _stored_experts(
        self, names: Sequence[tuple[str, str, str]]
    ) -> list[tuple[StoredQuantized, StoredQuantized]] | None:
        """(gate over up, down) of each expert; None: all are plain. On `meta` one stands for all."""
        first = self._stored_expert(names[0])
        if first is not None and first[0].codes.is_meta:
            return [first] * len(names)
        experts = [first, *(self._stored_expert(each) for each in names[1:])]
        stored = [each for each in experts if each is not None]
        forms = {tuple((half.kind, half.group) for half in each) for each in stored}
        if stored and (len(stored) < len(experts) or len(forms) > 1):
            raise _unmixable(names[0][0], "the layer's experts are not all stored in one way")
        return stored or None

    def _stored_expert(self, names: tuple[str, str, str]) -> tuple[StoredQuantized, StoredQuantized] | None:
        parts = [self._source.quantized(f"{name}.weight") for name in names]
        stored = [part.to(self._device) for part in parts if part is not None]
        if not stored:
            return None
        if any(part.order is not None for part in stored):
            raise _unmixable(names[0], "its columns are in the order of activations (desc_act, actorder)")
        if len(stored) < len(parts) or not _are_joinable(stored[0], stored[1]):
            raise _unmixable(names[0], "its matrices are not all stored in one way")
        return _join_stored(stored[:2]), stored[2]

    def _biases(self, names: Sequence[str]) -> Tensor | None:
        """[sum of outs], zeros where only others have one."""
        if not any(f"{name}.bias" in self._names for name in names):
            return None
        return _join([self._bias(name) for name in names])

    def _bias(self, name: str) -> Tensor:
        if f"{name}.bias" in self._names:
            return self.tensor(f"{name}.bias")
        outputs = self._source.shape(f"{name}.weight")[0]
        return torch.zeros(outputs, dtype=self._dtype, device=self._device)

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


def _are_joinable(one: StoredQuantized | None, other: StoredQuantized | None) -> bool:
    """Whether one product serves both. Orders of columns are not compared: the plan would have to know."""
    if one is None or other is None:
        return one is other
    return (one.kind, one.group) == (other.kind, other.group) and one.order is None and other.order is None


def _join_stored(parts: Sequence[StoredQuantized]) -> StoredQuantized:
    """Outputs one after another."""
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero for part in parts if part.zero is not None]
    return replace(
        parts[0],
        codes=_join([part.codes for part in parts]),
        scale=_join([part.scale for part in parts]),
        zero=_join(zeros) if zeros else None,
    )


def _unmixable(name: str, cause: str) -> InvalidArgument:
    return model_path_error(
        f"the quantised experts at {name} do not fit the operators that mix experts: {cause}",
        reason="QUANTIZATION_UNSUPPORTED",
    )
