"""Third duty of a plugin: operators. What a plugin does not override runs on the reference, and that is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition, InvalidArgument, NotFound
from plugins.sdk.capabilities import Coverage, OperatorCapability
from plugins.sdk.drift import ContractClass
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.memory import MemoryManager
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference import sampling
from plugins.sdk.runner import OperatorDecision

REFERENCE: dict[str, Callable[..., Any]] = {
    "embedding": reference.embedding,
    "linear": reference.linear,
    "rms_norm": reference.rms_norm,
    "add_rms_norm": reference.add_rms_norm,
    "rotary": reference.rotary,
    "silu_mul": reference.silu_mul,
    "write_kv": reference.write_kv,
    "attention_prefill": reference.attention_prefill,
    "attention_decode": reference.attention_decode,
    "argmax": sampling.argmax,
    "sample": sampling.sample,
}
"""The catalogue: every operator by name, with its reference implementation."""

Linear = Callable[..., Tensor]


@dataclass(frozen=True)
class OperatorTable:
    """The operators of one loaded model, chosen once: native or reference. Signatures as on OperatorSet."""

    embedding: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    attention_prefill: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
    attention_decode: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    argmax: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    relayout: Callable[[Tensor, str], Any]
    """A weight in the layout of the chosen implementation of an operator, made once at load."""
    decisions: Sequence[OperatorDecision]


class OperatorSet(ContractClass, contract=True):
    """Operators of one chip. Shapes and meaning of each: plugins.sdk.reference.

    A subclass overrides what it does better; `linear` of a subclass takes the weight that its memory
    manager's
    `relayout_weight` made. `declined`: operators that a subclass overrides but cannot run here, and why;
    filled in when the plugin starts. `constraints`: dtypes that an override takes, by name; absent: any.
    `kv_layout`: the order in memory of every cache that its operators get.
    """

    constraints: ClassVar[Mapping[str, Sequence[str]]] = {}
    kv_layout: ClassVar[KvLayout] = KvLayout()

    def __init__(self, memory: MemoryManager, *, declined: Mapping[str, str] | None = None) -> None:
        unknown = set(declined or ()) - REFERENCE.keys()
        if unknown:
            raise ValueError(f"operators that are not in the catalogue were declined: {sorted(unknown)}")
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

    def capabilities(self) -> list[OperatorCapability]:
        """One entry for each operator of the catalogue."""
        return [
            OperatorCapability(
                name=name,
                coverage=Coverage.NATIVE if not (reason := self._why_reference(name)) else Coverage.REFERENCE,
                dtypes=self.constraints.get(name, ()),
                reason=reason,
            )
            for name in REFERENCE
        ]

    def choose(self, dtype: str, *, strict: bool) -> OperatorTable:
        """The operators for a model of one compute dtype.

        Raises:
            FailedPrecondition: `strict`, and an operator would run on the reference; it is named with the
            reason.
        """
        reasons = {name: self._why_reference(name, dtype) for name in REFERENCE}
        if strict and (refused := [f"{name} ({reason})" for name, reason in reasons.items() if reason]):
            raise FailedPrecondition(
                f"strict is set and operators would run on the reference: {', '.join(refused)}; "
                "unset strict or choose another dtype",
                field="strict",
                reason="OPERATOR_NOT_NATIVE",
            )
        chosen = {name: self._reference(name) if reasons[name] else getattr(self, name) for name in REFERENCE}
        native = {name for name, reason in reasons.items() if not reason}
        return OperatorTable(
            **chosen,
            relayout=self._relayout_for(native),
            decisions=[_decide(*item) for item in reasons.items()],
        )

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
        arguments: dict[str, Any] = {**inputs, **attributes}
        native = not use_reference and not self._why_reference(name)
        if native and name == "linear" and "weight" in arguments:
            arguments["weight"] = self._memory.relayout_weight(arguments["weight"], operator=name)
        function = getattr(self, name) if native else self._reference(name)
        given: Any = arguments.get("kv_cache")
        try:
            if native and given is not None:
                arguments["kv_cache"] = self.kv_layout.place(given)
            outcome = function(**arguments)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
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
        allowed = self.constraints.get(name)
        if dtype is not None and allowed is not None and dtype not in allowed:
            return f"the plugin covers {', '.join(allowed)}, not {dtype}"
        return ""

    def _relayout_for(self, native: Collection[str]) -> Callable[[Tensor, str], Any]:
        def relayout(weight: Tensor, operator: str) -> Any:
            if operator not in native:
                return weight
            return self._memory.relayout_weight(weight, operator=operator)

        return relayout


def _decide(name: str, reason: str) -> OperatorDecision:
    return OperatorDecision(name, "reference" if reason else "native", reason or "covered by the plugin")
