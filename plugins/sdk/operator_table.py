"""The operators of one loaded model, as its plan chose them; models bind theirs by name and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plugins.sdk.catalogue import CATALOGUE, OpSpec, PartSpec
from plugins.sdk.planning import part_sites
from plugins.sdk.reference.fused import COMPOSITIONS
from plugins.sdk.runner import OperatorDecision

Implementation = Callable[..., Any]
Relayout = Callable[..., Any]
"""As MemoryManager.relayout_weight."""


@dataclass(frozen=True)
class BoundOperator:
    """One operator at one place of a model. `call`: with the signature on OperatorSet.

    `place(parameter, weight)`: a weight of the model in the form that `call` wants it, made once at load;
    opaque to everybody else.
    """

    name: str
    where: str
    call: Implementation
    place: Callable[[str, Tensor], Any]


class OperatorBinder(Protocol):
    """What a model is built on: the table, or what records its call sites."""

    def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
        """The operator `name` of the catalogue at a place such as "layers.0.mlp.down_proj". sizes: all of its
        fixed symbols but the page size S.
        """
        ...


@dataclass(frozen=True)
class Implementations:
    """What a chip has of each operator: its own by name, references by name, and its layout of weights."""

    native: Mapping[str, Implementation]
    reference: Mapping[str, Implementation]
    relayout: Relayout


class OperatorTable:
    """Chosen once, at load, by operator and sizes."""

    def __init__(self, decisions: Sequence[OperatorDecision], implementations: Implementations) -> None:
        self.decisions = tuple(decisions)
        self._implementations = implementations
        self._by_site = {_key(each.name, each.sizes): each for each in _with_parts(decisions)}

    def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
        """As OperatorBinder says.

        Raises:
            KeyError: the plan has no such call site.
        """
        decision = self._by_site[_key(name, sizes)]
        if decision.choice == "decomposed":
            return self._compose(CATALOGUE[name], where, sizes)
        if decision.choice == "reference":
            return BoundOperator(name, where, self._implementations.reference[name], _as_it_is)
        return BoundOperator(name, where, self._implementations.native[name], self._placing(decision))

    def _placing(self, decision: OperatorDecision) -> Callable[[str, Tensor], Any]:
        relayout, padding = self._implementations.relayout, decision.padded

        def place(parameter: str, weight: Tensor) -> Any:
            padded = _pad_experts(weight, padding["E"]) if "E" in padding else weight
            return relayout(padded, operator=decision.name, parameter=parameter)

        return place

    def _compose(self, spec: OpSpec, where: str, sizes: Mapping[str, int]) -> BoundOperator:
        sites = part_sites(spec, sizes, where)
        bound = {
            part.role: self.bind(site.operator, where, **site.sizes)
            for part, site in zip(spec.parts, sites, strict=True)
        }
        owners = {parameter: part for part in spec.parts for parameter in part.weights}

        def place(parameter: str, weight: Tensor) -> Any:
            part = owners[parameter]
            return _place_part(part, bound[part.role], parameter, weight)

        call = COMPOSITIONS[spec.name]({role: each.call for role, each in bound.items()})
        return BoundOperator(spec.name, where, call, place)


def _as_it_is(parameter: str, weight: Tensor) -> Tensor:
    del parameter
    return weight


def _place_part(part: PartSpec, bound: BoundOperator, parameter: str, weight: Tensor) -> Any:
    own = part.weights[parameter]
    if part.stacked:
        return [bound.place(own, each) for each in weight.unbind(0)]
    return bound.place(own, weight)


def _pad_experts(weight: Tensor, count: int) -> Tensor:
    """Experts of zeros behind the model's own; no token chooses them."""
    missing = weight.new_zeros((count - weight.shape[0], *weight.shape[1:]))
    return torch.cat((weight, missing))


def _with_parts(decisions: Sequence[OperatorDecision]) -> list[OperatorDecision]:
    """Parts first: a site of the model's own is the one that counts where both have the same sizes."""
    parts = [part for each in decisions for part in each.parts]
    return [*parts, *decisions]


def _key(name: str, sizes: Mapping[str, int]) -> tuple[str, frozenset[tuple[str, int]]]:
    return name, frozenset((symbol, size) for symbol, size in sizes.items() if symbol != "S")
