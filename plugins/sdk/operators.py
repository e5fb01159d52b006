"""Third duty of a plugin: operators. What a plugin does not override runs on the reference, and that is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition, InvalidArgument, NotFound
from plugins.sdk.capabilities import Coverage, OperatorCapability
from plugins.sdk.catalogue import CATALOGUE, STEP_SYMBOLS, OpSpec, holds, symbols_of
from plugins.sdk.drift import ContractClass
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operator_table import Implementations, OperatorTable
from plugins.sdk.planning import RUNS_ON_CHIP, CallSite, plan_operators
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference import quantized, sampling
from plugins.sdk.reference.fused import COMPOSITIONS
from plugins.sdk.reference.routing import moe_route
from plugins.sdk.runner import OperatorDecision

_PARTS: dict[str, Callable[..., Any]] = {
    "embedding": reference.embedding,
    "linear": reference.linear,
    "rms_norm": reference.rms_norm,
    "rotary": reference.rotary,
    "silu_mul": reference.silu_mul,
    "write_kv": reference.write_kv,
    "attention_prefill": reference.attention_prefill,
    "attention_decode": reference.attention_decode,
    "gelu_mul": reference.gelu_mul,
    "attention_prefill_bounded": reference.attention_prefill_bounded,
    "attention_decode_bounded": reference.attention_decode_bounded,
    "argmax": sampling.argmax,
    "sample": sampling.sample,
    "moe_route": moe_route,
    "linear_w8a8": quantized.linear_w8a8,
    "linear_w4a16": quantized.linear_w4a16,
}


def _reference_of(spec: OpSpec) -> Callable[..., Any]:
    """An operator's own reference, or that of its parts."""
    if not spec.parts:
        return _PARTS[spec.name]
    return COMPOSITIONS[spec.name]({part.role: _PARTS[part.operator] for part in spec.parts})


REFERENCE: dict[str, Callable[..., Any]] = {name: _reference_of(spec) for name, spec in CATALOGUE.items()}
"""The catalogue: every operator by name, with its reference implementation."""


_WHEN_UNREADABLE = (TypeError, ValueError, IndexError, RuntimeError)
"""What inputs that do not fit raise, in torch and in a vendor's operators."""


class OperatorSet(ContractClass, contract=True):
    """Operators of one chip. Shapes and meaning of each: plugins.sdk.reference.

    A subclass overrides what it does better; an override takes weights as its memory manager's
    `relayout_weight` made them. `declined`: operators that a subclass overrides but cannot run here, and why;
    filled in when the plugin starts. By operator: `dtypes` that an override takes, absent: any; `constraints`
    on sizes that a model fixes, in the catalogue's symbols, such as "E % 4 == 0".
    `kv_layout`: the order in memory of every cache that its operators get.
    """

    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {}
    constraints: ClassVar[Mapping[str, Sequence[str]]] = {}
    kv_layout: ClassVar[KvLayout] = KvLayout()

    def __init__(self, memory: MemoryManager, *, declined: Mapping[str, str] | None = None) -> None:
        unknown = set(declined or ()) - REFERENCE.keys()
        if unknown:
            raise ValueError(f"operators that are not in the catalogue were declined: {sorted(unknown)}")
        _check_constraints(self.constraints)
        self.declined: Mapping[str, str] = dict(declined or {})
        self._memory = memory

    def torch_device(self, device: int) -> torch.device:
        """Where torch keeps tensors of a device, counted from 0."""
        return torch.device("cpu")

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of an embedding table."""
        return reference.embedding(token_ids, weight)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x times weight transposed, plus bias."""
        return reference.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square normalisation."""
        return reference.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Residual addition and its normalisation."""
        return reference.add_rms_norm(x, residual, weight, eps)

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary position embedding."""
        return reference.rotary(query, key, positions, cos_sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """The gate of a gated feed-forward layer."""
        return reference.silu_mul(gate_up)

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        """Write keys and values into the paged cache."""
        reference.write_kv(key, value, kv_cache, cells)

    def attention_prefill(
        self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float
    ) -> Tensor:
        """Causal attention of one sequence's run of tokens."""
        return reference.attention_prefill(query, kv_cache, page_ids, start, scale)

    def attention_decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """Attention of one token of each sequence."""
        return reference.attention_decode(query, kv_cache, page_table, lengths, mask, scale)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """The gate of a gated feed-forward layer with gelu."""
        return reference.gelu_mul(gate_up)

    def attention_prefill_bounded(
        self,
        query: Tensor,
        kv_cache: Tensor,
        page_ids: Tensor,
        start: int,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> Tensor:
        """Causal attention within a window, scores under a soft cap; 0: without that bound."""
        return reference.attention_prefill_bounded(query, kv_cache, page_ids, start, scale, window, soft_cap)

    def attention_decode_bounded(
        self,
        query: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> Tensor:
        """Attention of one token of each sequence, bounded likewise."""
        return reference.attention_decode_bounded(
            query, kv_cache, page_table, lengths, scale, window, soft_cap
        )

    def argmax(self, logits: Tensor) -> Tensor:
        """Greedy sampling."""
        return sampling.argmax(logits)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        """Filtered random sampling."""
        return sampling.sample(logits, temperature, top_k, top_p, min_p, uniform)

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
        """Query, key and value of one product, positions applied."""
        made: tuple[Tensor, Tensor, Tensor] = REFERENCE["qkv_rotary"](
            x, weight, bias, positions, cos_sin, heads, kv_heads
        )
        return made

    def moe_route(self, router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
        """Experts of each token and their weights."""
        return moe_route(router_logits, top_k, renormalize)

    def moe_experts(self, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Weighted sum of each token's experts."""
        made: Tensor = REFERENCE["moe_experts"](x, gate_up, down, weights, expert_ids)
        return made

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        """Product with int8 weights of activations quantised by row."""
        return quantized.linear_w8a8(x, weight, scale, bias)

    def linear_w4a16(
        self, x: Tensor, weight: Any, scale: Any, zero: Any, bias: Tensor | None = None
    ) -> Tensor:
        """Product with 4-bit weights in groups."""
        return quantized.linear_w4a16(x, weight, scale, zero, bias)

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
        """moe_experts over int8 weights."""
        made: Tensor = REFERENCE["moe_experts_w8a8"](
            x, gate_up, gate_up_scale, down, down_scale, weights, expert_ids
        )
        return made

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
        """moe_experts over 4-bit weights."""
        first, second = (gate_up, gate_up_scale, gate_up_zero), (down, down_scale, down_zero)
        made: Tensor = REFERENCE["moe_experts_w4a16"](x, *first, *second, weights, expert_ids)
        return made

    def capabilities(self) -> list[OperatorCapability]:
        """One entry for each operator of the catalogue."""
        return [self._capability(name) for name in REFERENCE]

    def choose(
        self, sites: Sequence[CallSite], *, dtype: str, page_size: int | None = None, strict: bool = False
    ) -> OperatorTable:
        """The operators for a model of one compute dtype, by plan.

        Raises:
            FailedPrecondition: as plugins.sdk.planning.plan_operators.
        """
        decisions = plan_operators(
            self.capabilities(), sites, dtype=dtype, page_size=page_size, strict=strict
        )
        return self.table(decisions)

    def table(self, decisions: Sequence[OperatorDecision]) -> OperatorTable:
        """What carries out a plan's decisions.

        Raises:
            FailedPrecondition: the plan, and so the capability report, says native where there is no
                override.
        """
        missing = [
            each.name for each in decisions if each.choice in RUNS_ON_CHIP and self._why_reference(each.name)
        ]
        if missing:
            raise FailedPrecondition(
                f"the capability report declares operators that the plugin has not: {', '.join(missing)}; "
                "report what OperatorSet.capabilities() returns",
                field="backend",
                reason="CONTRADICTORY_REPORT",
            )
        implementations = Implementations(
            native={name: getattr(self, name) for name in REFERENCE},
            reference={name: self._reference(name) for name in REFERENCE},
            relayout=self._memory.relayout_weight,
        )
        return OperatorTable(decisions, implementations)

    def run(
        self,
        name: str,
        inputs: Mapping[str, Tensor],
        attributes: Mapping[str, int | float | bool | str],
        *,
        use_reference: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run one operator by name, for conformance and precision tools; `write_kv` returns the cache.

        Raises:
            NotFound: no such operator. InvalidArgument: the inputs do not fit its signature.
        """
        if name not in REFERENCE:
            raise NotFound(f"operator {name!r} is unknown; known: {', '.join(REFERENCE)}", field="name")
        spec = CATALOGUE[name]
        missing = {each.name: None for each in spec.inputs if each.optional}
        arguments: dict[str, Any] = {**missing, **inputs, **attributes}
        native = not use_reference and not self._why_reference(name)
        if native:
            self._require_constraints(spec, inputs)
            for parameter in spec.weights:
                if parameter in inputs:
                    arguments[parameter] = self._memory.relayout_weight(
                        inputs[parameter], operator=name, parameter=parameter
                    )
        function = getattr(self, name) if native else self._reference(name)
        given: Any = arguments.get("kv_cache")
        try:
            if native and given is not None:
                arguments["kv_cache"] = self.kv_layout.place(given)
            outcome = function(*_in_order(spec, arguments))
        except _WHEN_UNREADABLE as error:
            raise InvalidArgument(
                f"inputs of operator {name!r} do not fit: {error}", field="inputs"
            ) from error
        if outcome is None:
            if arguments["kv_cache"] is not given:
                given.copy_(arguments["kv_cache"])
            return (given,)
        return outcome if isinstance(outcome, tuple) else (outcome,)

    def coverage(self, name: str) -> Coverage:
        """Which implementation `run` takes. Raises KeyError for an operator outside the catalogue."""
        if name not in REFERENCE:
            raise KeyError(name)
        return Coverage.REFERENCE if self._why_reference(name) else Coverage.NATIVE

    def _reference(self, name: str) -> Callable[..., Any]:
        """The reference of an operator as this chip runs it: a chip without float64 runs `sample` on the
        host.
        """
        return REFERENCE[name]

    def _why_reference(self, name: str, dtype: str | None = None) -> str:
        """Why an operator runs on the reference; "" where it is native."""
        if getattr(type(self), name) is getattr(OperatorSet, name):
            return "the plugin does not cover it"
        if name in self.declined:
            return self.declined[name]
        allowed = self.dtypes.get(name)
        if dtype is not None and allowed is not None and dtype not in allowed:
            return f"the plugin covers {', '.join(allowed)}, not {dtype}"
        return ""

    def _capability(self, name: str) -> OperatorCapability:
        reason = self._why_reference(name)
        if reason:
            return OperatorCapability(name=name, coverage=Coverage.REFERENCE, reason=reason)
        return OperatorCapability(
            name=name,
            coverage=Coverage.NATIVE,
            dtypes=self.dtypes.get(name, ()),
            constraints=self.constraints.get(name, ()),
        )

    def _require_constraints(self, spec: OpSpec, inputs: Mapping[str, Tensor]) -> None:
        sizes = _sizes_of(spec, inputs)
        for constraint in self.constraints.get(spec.name, ()):
            if symbols_of(constraint) <= sizes.keys() and not holds(constraint, sizes):
                seen = ", ".join(f"{each} is {sizes[each]}" for each in sorted(symbols_of(constraint)))
                raise FailedPrecondition(
                    f"operator {spec.name!r} of this chip takes {constraint} only, and here {seen}",
                    field="inputs",
                    reason="CONSTRAINT_UNMET",
                )


def _in_order(spec: OpSpec, arguments: Mapping[str, Any]) -> list[Any]:
    """By position: references of fused operators are compositions, which name their parameters otherwise."""
    names = [*(each.name for each in spec.inputs), *(each.name for each in spec.attributes)]
    strangers = sorted(arguments.keys() - set(names))
    if strangers or any(name not in arguments for name in names):
        raise TypeError(f"it takes {', '.join(names)}; given were {', '.join(arguments)}")
    return [arguments[name] for name in names]


def _sizes_of(spec: OpSpec, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """The symbols that inputs show as a dimension of their own."""
    return {
        symbol: size
        for tensor in spec.inputs
        if tensor.name in inputs
        for symbol, size in zip(tensor.shape, inputs[tensor.name].shape, strict=False)
        if symbol.isalpha() and len(symbol) == 1
    }


def _check_constraints(constraints: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError: a mistake of the plugin's author, found when the plugin starts."""
    for name, expressions in constraints.items():
        known = CATALOGUE[name].fixed_symbols if name in CATALOGUE else frozenset()
        for expression in expressions:
            strangers = sorted(symbols_of(expression) - known)
            if strangers:
                raise ValueError(
                    f"constraint {expression!r} of {name} names {', '.join(strangers)}; it may name "
                    f"{', '.join(sorted(known)) or 'nothing'}: sizes of a step "
                    f"({', '.join(sorted(STEP_SYMBOLS))}) are padded by the operator itself"
                )
