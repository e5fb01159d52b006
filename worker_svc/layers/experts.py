"""A mixture of experts in place of a feed-forward part: a router, its choice, and the chosen ones' sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from worker_svc.layers.feed_forward import GatedFeedForward
from worker_svc.layers.linear import LinearLoader


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's matrices without `.weight`: the router, and of each expert (gate, up, down)."""

    router: str
    of_expert: Callable[[int], tuple[str, str, str]]


@dataclass(frozen=True)
class Choice:
    """chosen of count experts for each token; renormalize: their weights add up to 1."""

    count: int
    chosen: int
    renormalize: bool


class Experts:
    """Routed experts, all gated by silu."""

    def __init__(
        self, block: str, names: ExpertNames, choice: Choice, loader: LinearLoader, operators: OperatorBinder
    ) -> None:
        """block: where it is in the model, for the plan."""
        self._router = loader.load(names.router, names.router, plain=True)
        self._choice = choice
        self._route = operators.bind("moe_route", names.router, E=choice.count, A=choice.chosen).call
        packed = loader.load_experts([names.of_expert(each) for each in range(choice.count)])
        bound = operators.bind(packed.operator, f"{block}.experts", A=choice.chosen, **packed.sizes)
        self._weights = [bound.place(name, tensor) for name, tensor in packed.tensors.items()]
        self._mix = bound.call
        self.weight_bytes = self._router.weight_bytes + packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[t, hidden] as it is."""
        choice = self._choice
        weights, ids = self._route(self._router(x), choice.chosen, int(choice.renormalize))
        made: Tensor = self._mix(x, *self._weights, weights, ids)
        return made


class SharedExperts:
    """Routed experts and one that serves every token, by a gate of its own between 0 and 1."""

    def __init__(self, routed: Experts, shared: GatedFeedForward, gate: str, loader: LinearLoader) -> None:
        """gate: the name of its matrix [1, hidden]."""
        self._routed, self._shared = routed, shared
        self._gate = loader.load(gate, gate, plain=True)
        self.weight_bytes = routed.weight_bytes + shared.weight_bytes + self._gate.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[t, hidden] as it is."""
        return self._routed(x) + torch.sigmoid(self._gate(x)) * self._shared(x)
