"""Trials at start: each operator of a plugin compared once with the reference, on the device.

A plugin runs them over what it would use, and declines what differs: a kernel for other hardware, a build
with a fault or a wrong guess at a library's interface is found before a model is loaded, and the reference
runs instead. They are few and small, for a start takes seconds; the whole proof is `chipmesh conformance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plugins.sdk.catalogue import CATALOGUE, OpSpec
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import REFERENCE, OperatorSet

_ROUNDINGS = 16
"""Results may lie this many unit roundoffs of the largest value apart: sums in another order stay far below,
a wrong scale, length, slot or layout lies far above.
"""
_LEAST_ROUNDOFF = 2.0**-20
"""In float32 sums of hundreds of terms matter more than the rounding of the result."""
_STEP = 2.0**-4
_PAGES = 6
_LONG_PAGES = 48
"""Pages of the longest sequence, of which the cache has fewer: some come again and again."""

Inputs = dict[str, Any]
"""Arguments by name, in the order of the catalogue; tensors on the host, None: an optional one left out."""
MakeInputs = Callable[["TrialMaker"], Inputs]
"""One trial of an operator: its inputs, of the sizes and the dtype that the maker has."""


@dataclass(frozen=True)
class TrialSizes:
    """Sizes that a model fixes: query heads, key/value heads, head size, tokens of a page, hidden size, inner
    size, experts, and how many of those a token has.
    """

    heads: int = 6
    groups: int = 2
    size: int = 64
    page: int = 16
    hidden: int = 96
    inner: int = 48
    experts: int = 5
    chosen: int = 2


@dataclass(frozen=True)
class OperatorTrials:
    """How to try operators of one chip.

    memory: makes the operators' own form of weights. place: a host tensor, copied to the device.
    synchronize: wait for the device; a kernel that fails late raises there. sizes: each is tried.
    layout: the operators' own. own: the chip's own trials by operator, in place of those here: for kernels
    that take other sizes, or operators that nothing tries here.
    """

    memory: MemoryManager
    place: Callable[[Tensor], Tensor]
    synchronize: Callable[[], None]
    sizes: Sequence[TrialSizes] = (TrialSizes(),)
    layout: KvLayout = field(default_factory=KvLayout)
    own: Mapping[str, Sequence[MakeInputs]] = field(default_factory=dict)

    def find_problem(self, operators: OperatorSet, name: str, dtypes: Iterable[str]) -> str:
        """How an operator differs from the reference in any of the dtypes; "" where it does not, or where
        nothing tries it. Whatever it raises is a difference.
        """
        for sizes in self.sizes:
            for dtype in dtypes:
                maker = TrialMaker(sizes, getattr(torch, dtype), self.layout)
                for make in self.own.get(name, TRIALS.get(name, ())):
                    if problem := self._try(operators, CATALOGUE[name], make(maker)):
                        return f"compared with the reference at load in {dtype}: {problem}"
        return ""

    def _try(self, operators: OperatorSet, spec: OpSpec, inputs: Inputs) -> str:
        try:
            return self._compare(operators, spec, inputs)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a reason to decline it
            return f"{type(error).__name__}: {error}"

    def _compare(self, operators: OperatorSet, spec: OpSpec, inputs: Inputs) -> str:
        expected = {name: _copied(value) for name, value in inputs.items()}
        wanted = _results(REFERENCE[spec.name](*expected.values()), expected, spec)
        given = {name: self._on_device(value) for name, value in inputs.items()}
        got = _results(getattr(operators, spec.name)(*self._relaid(spec, given)), given, spec)
        self.synchronize()
        changed = [
            name for name, value in given.items() if name not in spec.writes and _differs(value, inputs[name])
        ]
        if changed:
            return f"it changed its input {changed[0]}"
        problems = (distance(part.cpu(), other) for part, other in zip(got, wanted, strict=True))
        return next(filter(None, problems), "")

    def _relaid(self, spec: OpSpec, given: Inputs) -> list[Any]:
        return [
            self.memory.relayout_weight(value, operator=spec.name, parameter=name)
            if name in spec.weights and value is not None
            else value
            for name, value in given.items()
        ]

    def _on_device(self, value: Any) -> Any:
        """With the strides that it has on the host: torch copies a part of a tensor without its gaps."""
        if not isinstance(value, Tensor):
            return value
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return self.place(value.as_strided((span,), (1,))).as_strided(value.shape, value.stride(), 0)


def distance(got: Tensor, wanted: Tensor) -> str:
    """How a result differs from the one wanted, both on the host; "" where it is within rounding."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"the result is {got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"
    if not wanted.is_floating_point():
        return "" if torch.equal(got, wanted) else "results differ"
    roundoff = max(torch.finfo(wanted.dtype).eps / 2, _LEAST_ROUNDOFF)
    limit = _ROUNDINGS * roundoff * float(wanted.float().abs().max())
    error = float((got.float() - wanted.float()).abs().max())
    # Written so that NaN is a difference.
    return "" if error <= limit else f"off by {error:.3g}, limit {limit:.3g}"


def _results(outcome: Any, inputs: Inputs, spec: OpSpec) -> Sequence[Tensor]:
    if spec.writes:
        return [inputs[name] for name in spec.writes]
    return outcome if isinstance(outcome, tuple) else (outcome,)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _differs(value: Any, before: Any) -> bool:
    return isinstance(value, Tensor) and not torch.equal(value.cpu(), before)


def tried_operators() -> list[str]:
    """Operators that TRIALS has, in the order of the catalogue."""
    return [name for name in CATALOGUE if name in TRIALS]


@dataclass(frozen=True)
class TrialMaker:
    """Draws tensors by seed, so that every start and every chip sees the same. Caches lie in `layout`."""

    sizes: TrialSizes
    dtype: torch.dtype
    layout: KvLayout = field(default_factory=KvLayout)

    def random(self, seed: int, *shape: int, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(shape, generator=generator) * factor).to(self.dtype)

    def cache(self) -> Tensor:
        """[2, pages, page, g, d] in the chip's order in memory."""
        shape = (2, _PAGES, self.sizes.page, self.sizes.groups, self.sizes.size)
        memory = self.random(3, *self.layout.memory_shape(shape))
        cache: Tensor = self.layout.as_cache(memory)
        return cache

    def steps(self, seed: int, rows: int, columns: int) -> Tensor:
        """Rows that int8 holds exactly, the largest magnitude of each at 127 steps: quantising them rounds
        nothing, so that every chip has the same integers.
        """
        values = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))
        values[:, 0] = 127
        return (values * _STEP).to(self.dtype)

    def int8(self, seed: int, *shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)

    def positive(self, seed: int, *shape: int) -> Tensor:
        """float32 in [0.5, 1.5) / 1000."""
        return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5) / 1000

    def choice(self, rows: int) -> Inputs:
        """weights and expert_ids of `rows` tokens: one expert is chosen by nobody, no token has one twice."""
        experts, chosen = self.sizes.experts, self.sizes.chosen
        order = torch.rand(rows, experts - 1, generator=torch.Generator().manual_seed(8)).argsort(dim=1)
        weights = torch.rand(rows, chosen, generator=torch.Generator().manual_seed(9)) + 0.1
        return {"weights": weights, "expert_ids": order[:, :chosen].contiguous()}


def _embedding(make: TrialMaker) -> Inputs:
    return {"token_ids": torch.tensor([6, 0, 6, 3]), "weight": make.random(1, 7, make.sizes.hidden)}


def _linear(make: TrialMaker) -> Inputs:
    hidden = make.sizes.hidden
    return {
        "x": make.random(1, 5, hidden),
        "weight": make.random(2, 40, hidden, factor=0.1),
        "bias": make.random(4, 40),
    }


def _linear_without_bias(make: TrialMaker) -> Inputs:
    return {**_linear(make), "x": make.random(1, 1, make.sizes.hidden), "bias": None}


def _rms_norm(make: TrialMaker) -> Inputs:
    weight = 1 + make.random(2, make.sizes.hidden, factor=0.25)
    return {"x": make.random(1, 5, make.sizes.hidden), "weight": weight, "eps": 1e-5}


def _add_rms_norm(make: TrialMaker) -> Inputs:
    norm = _rms_norm(make)
    residual = make.random(5, 5, make.sizes.hidden)
    return {"x": norm["x"], "residual": residual, "weight": norm["weight"], "eps": norm["eps"]}


def _cos_sin(size: int) -> Tensor:
    angles = torch.outer(torch.arange(12.0), 10000.0 ** -(torch.arange(0, size, 2) / size))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _rotary(make: TrialMaker) -> Inputs:
    """Query and key as parts of one product: rows with gaps."""
    heads, groups = make.sizes.heads, make.sizes.groups
    joined = make.random(1, 5, heads + groups, make.sizes.size)
    return {
        "query": joined[:, :heads],
        "key": joined[:, heads:],
        "positions": torch.tensor([3, 0, 11, 1, 9]),
        "cos_sin": _cos_sin(make.sizes.size),
    }


def _rotary_apart(make: TrialMaker) -> Inputs:
    """Query and key of their own: who makes rows contiguous before working in place changes these."""
    joined = _rotary(make)
    return {**joined, "query": joined["query"].contiguous(), "key": joined["key"].contiguous()}


def _qkv_rotary(make: TrialMaker) -> Inputs:
    sizes = make.sizes
    rows = (sizes.heads + 2 * sizes.groups) * sizes.size
    return {
        "x": make.random(1, 5, sizes.hidden),
        "weight": make.random(2, rows, sizes.hidden, factor=0.1),
        "bias": make.random(4, rows),
        "positions": torch.tensor([3, 0, 11, 1, 9]),
        "cos_sin": _cos_sin(sizes.size),
        "heads": sizes.heads,
        "kv_heads": sizes.groups,
    }


def _silu_mul(make: TrialMaker) -> Inputs:
    return {"gate_up": make.random(1, 5, 2 * make.sizes.inner, factor=2.0)}


def _gelu_mul(make: TrialMaker) -> Inputs:
    return {"gate_up": make.random(1, 5, 2 * make.sizes.inner, factor=2.0)}


def _bounded(make_plain: MakeInputs, window: int, soft_cap: float) -> MakeInputs:
    def made(make: TrialMaker) -> Inputs:
        plain = {name: value for name, value in make_plain(make).items() if name != "mask"}
        return {**plain, "window": window, "soft_cap": soft_cap}

    return made


def _write_kv(make: TrialMaker) -> Inputs:
    """Rows that cross pages, among cells that nobody may touch."""
    page, groups, size = make.sizes.page, make.sizes.groups, make.sizes.size
    return {
        "key": make.random(1, 6, groups, size),
        "value": make.random(2, 6, groups, size),
        "kv_cache": make.cache(),
        "cells": torch.tensor([page - 1, 4 * page, 4 * page + 1, 1, 2 * page - 1, 3 * page + 5]),
    }


def _prefill(start_pages: int, start: int, count: int) -> MakeInputs:
    """count 0: a whole page."""

    def made(make: TrialMaker) -> Inputs:
        page = make.sizes.page
        first, tokens = start_pages * page + start, count or page
        return {
            "query": make.random(1, tokens, make.sizes.heads, make.sizes.size),
            "kv_cache": make.cache(),
            "page_ids": torch.arange(_PAGES).roll(2).repeat(2)[: (first + tokens - 1) // page + 1],
            "start": first,
            "scale": 0.75 * make.sizes.size**-0.5,
        }

    return made


def _decode(make: TrialMaker) -> Inputs:
    """A single token, a full page, and somewhat more than two pages; unused places of the table hold 0."""
    page = make.sizes.page
    return _decoding(make, [[2, 0, 0], [1, 0, 0], [5, 3, 4]], [1, page, 2 * page + page // 2])


def _decode_long(make: TrialMaker) -> Inputs:
    """Long enough to be split into parts, beside a row that is in the first part only."""
    table = [[(3 * place + row) % _PAGES for place in range(_LONG_PAGES)] for row in range(2)]
    return _decoding(make, table, [_LONG_PAGES * make.sizes.page - 3, 5])


def _decoding(make: TrialMaker, table: list[list[int]], held: list[int]) -> Inputs:
    lengths = torch.tensor(held)
    hidden = torch.arange(len(table[0]) * make.sizes.page) >= lengths.unsqueeze(1)
    return {
        "query": make.random(1, len(held), make.sizes.heads, make.sizes.size),
        "kv_cache": make.cache(),
        "page_table": torch.tensor(table),
        "lengths": lengths,
        "mask": torch.zeros(hidden.shape, dtype=make.dtype).masked_fill(hidden, float("-inf")),
        "scale": 0.75 * make.sizes.size**-0.5,
    }


def _argmax(make: TrialMaker) -> Inputs:
    """The lowest among equals wins."""
    del make
    return {"logits": torch.tensor([[0.0, 2.0, -1.0, 2.0], [-3.0, -4.0, -3.5, -3.0]])}


def _sample(make: TrialMaker) -> Inputs:
    """No filter, then each alone, then all; draws in the middle of a token's share."""
    del make
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0, 2.5]]).repeat(5, 1)
    return {
        "logits": logits,
        "temperature": torch.tensor([1.0, 0.5, 1.5, 1.0, 0.8]),
        "top_k": torch.tensor([0, 2, 0, 0, 3]),
        "top_p": torch.tensor([1.0, 1.0, 0.6, 1.0, 0.9]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.3, 0.1]),
        "uniform": torch.tensor([0.31, 0.85, 0.45, 0.9, 0.07], dtype=torch.float64),
    }


def _moe_route(rows: int, renormalize: int) -> MakeInputs:
    """Whole numbers, among which equals are common: the lowest id has to come first. Of several rows the
    first is of equals, the last without any.
    """

    def made(make: TrialMaker) -> Inputs:
        values = make.random(6, rows, make.sizes.experts, factor=1.5)
        logits = values.round()
        if rows > 1:
            logits[0], logits[-1] = 0.5, values[-1]
        return {"router_logits": logits, "top_k": make.sizes.chosen, "renormalize": renormalize}

    return made


def _many(make: TrialMaker) -> Inputs:
    return make.choice(29)


def _single(make: TrialMaker) -> Inputs:
    return make.choice(1)


def _all_to_one(make: TrialMaker) -> Inputs:
    return {"weights": torch.full((9, 1), 0.75), "expert_ids": torch.full((9, 1), make.sizes.experts // 2)}


EXPERT_CHOICES: Sequence[MakeInputs] = (_many, _single, _all_to_one)
"""weights and expert_ids of many tokens, of a single one, and of some that all go to one expert."""


def _moe_experts(choose: MakeInputs) -> MakeInputs:
    def made(make: TrialMaker) -> Inputs:
        experts, inner, hidden = make.sizes.experts, make.sizes.inner, make.sizes.hidden
        choice = choose(make)
        return {
            "x": make.random(1, len(choice["expert_ids"]), hidden),
            "gate_up": make.random(2, experts, 2 * inner, hidden, factor=0.1),
            "down": make.random(3, experts, hidden, inner, factor=0.1),
            **choice,
        }

    return made


def _linear_w8a8(make: TrialMaker) -> Inputs:
    """A row of zeros among others, and sizes that divide by nothing."""
    columns = make.sizes.hidden - 1
    x = make.steps(1, 5, columns)
    x[2] = 0.0
    return {
        "x": x,
        "weight": make.int8(2, 37, columns),
        "scale": make.positive(4, 37),
        "bias": make.random(5, 37),
    }


def _linear_w4a16(make: TrialMaker) -> Inputs:
    half, groups = make.sizes.hidden // 2, 3
    return {
        "x": make.random(1, 5, 2 * half),
        "weight": make.int8(2, 40, half).view(torch.uint8),
        "scale": make.positive(4, 40, groups),
        "zero": (make.int8(6, 40, groups) & 15).to(torch.uint8),
        "bias": make.random(5, 40),
    }


TRIALS: Mapping[str, Sequence[MakeInputs]] = {
    "embedding": (_embedding,),
    "linear": (_linear, _linear_without_bias),
    "rms_norm": (_rms_norm,),
    "add_rms_norm": (_add_rms_norm,),
    "rotary": (_rotary, _rotary_apart),
    "silu_mul": (_silu_mul,),
    "write_kv": (_write_kv,),
    "attention_prefill": (_prefill(0, 0, 7), _prefill(0, 0, 0), _prefill(1, 5, 20)),
    "attention_decode": (_decode, _decode_long),
    "gelu_mul": (_gelu_mul,),
    "attention_prefill_bounded": (_bounded(_prefill(0, 0, 7), 3, 0.0), _bounded(_prefill(1, 5, 20), 9, 2.0)),
    "attention_decode_bounded": (_bounded(_decode, 5, 0.0), _bounded(_decode_long, 0, 2.0)),
    "argmax": (_argmax,),
    "sample": (_sample,),
    "qkv_rotary": (_qkv_rotary,),
    "moe_route": (_moe_route(5, 0), _moe_route(5, 1), _moe_route(1, 1)),
    "moe_experts": tuple(_moe_experts(choose) for choose in EXPERT_CHOICES),
    "linear_w8a8": (_linear_w8a8,),
    "linear_w4a16": (_linear_w4a16,),
}
"""By operator. moe_experts_w8a8 and moe_experts_w4a16 are not tried. The first rounds to int8 between its
products, from values in which a chip and the reference differ by the last bit: in float32 no small comparison
tells a fault from that. Both stand or fall with their parts.
"""
