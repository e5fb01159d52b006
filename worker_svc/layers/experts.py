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
        self,
        block: str,
        names: ExpertNames,
        choice: Choice,
        loader: LinearLoader,
        operators: OperatorBinder,
        *,
        held: range,
    ) -> None:
        """block: where it is in the model, for the plan. held: the experts that are here, of `choice.count`;
        where not all are, the result is these experts' part of the sum.
        """
        self._router = loader.load(names.router, names.router, plain=True)
        self._choice = choice
        self._route = operators.bind("moe_route", names.router, E=choice.count, A=choice.chosen).call
        self._held = held if len(held) < choice.count else None
        chosen = choice.chosen if self._held is None else 1
        packed = loader.load_experts([names.of_expert(each) for each in held])
        bound = operators.bind(packed.operator, f"{block}.experts", A=chosen, **packed.sizes)
        self._weights = [bound.place(name, tensor) for name, tensor in packed.tensors.items()]
        self._mix = bound.call
        self.weight_bytes = self._router.weight_bytes + packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[t, hidden] as it is."""
        choice = self._choice
        weights, ids = self._route(self._router(x), choice.chosen, int(choice.renormalize))
        if self._held is not None:
            return self._mix_held(x, weights, ids, self._held)
        made: Tensor = self._mix(x, *self._weights, weights, ids)
        return made

    def _mix_held(self, x: Tensor, weights: Tensor, ids: Tensor, held: range) -> Tensor:
        """The part of the sum that the experts here make: each choice of one of them is a row of its own.

        Rows are put back one place of choice after another, in which no token comes twice: sums over repeated
        indices take another order, and so other bits, at each run of some chips.
        """
        here = ((ids >= held.start) & (ids < held.stop)).T
        places, tokens = here.nonzero(as_tuple=True)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if not len(tokens):
            return total.to(x.dtype)
        own_ids = (ids[tokens, places] - held.start).unsqueeze(1)
        made = self._mix(x[tokens], *self._weights, weights[tokens, places].unsqueeze(1), own_ids)
        counts: list[int] = here.sum(dim=1).tolist()
        for rows, of_tokens in zip(torch.split(made, counts), torch.split(tokens, counts), strict=True):
            total[of_tokens] += rows
        return total.to(x.dtype)


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
