"""How far apart two sides may be at one call: the catalogue's tolerance of each, over magnitudes bounded from
what is at hand.

plugins.conformance has the magnitudes exactly, from plain weights in float64. A loaded model's weights are
opaque, so here: |x| |W|^T is bounded by |x|'s length times the row's length; rotary's by the length of a
pair; attention's come from the reference on |values|, with |q| |k| bounded by lengths. Of experts nothing is
known between their products: the row's root mean square stands for both magnitudes, with room for what is
done there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plugins.sdk.catalogue import CATALOGUE, SMALLEST_NORMAL, UNIT_ROUNDOFF, TensorSpec, evaluate
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference.quantized import LEVELS
from worker_svc.diff.calls import RepeatedCall

_NEAR_A_TIE = LEVELS * 4 * UNIT_ROUNDOFF["float32"]
"""Of an int8 step: how far off x / step may be in float32, divided or multiplied by a reciprocal."""
_INNER_ROUNDINGS = 4.0
"""Of experts: by how much the roundings within outweigh those of the result; 2.7 has been seen."""
_LEVELS_PER_ROUNDOFF = 200.0
"""A value of 30 steps that is three roundings off crosses a tie with a chance of about 200 u."""
_STEPS = 0.06
"""Of a row: an int8 step of the inner values, whose largest is some eight deviations, over 127 levels."""


@dataclass(frozen=True)
class Precision:
    """What one side computes and sums in, by name."""

    dtype: str
    accumulation: str


@dataclass(frozen=True)
class Magnitudes:
    """Of one output, as plugins.sdk.catalogue.Tolerance has them: float64, its shape or a part of it.

    underflow: by how much an intermediate that was flushed to zero may have been multiplied. slack: absolute,
    by activations that lie between two int8 steps, which one side may round up and the other down.
    """

    rounded: Tensor
    summed: Tensor
    underflow: Tensor | float = 1.0
    slack: Tensor | float = 0.0


def allowed_differences(
    repeated: RepeatedCall, values: Sequence[Tensor], precisions: Sequence[Precision]
) -> list[Tensor]:
    """float64 of each output's shape. values: the call's outputs, float64 and finite."""
    call = repeated.call
    specs = _outputs_of(call.name)
    exact = all(spec.tolerance.exact for spec in specs)
    magnitudes = [] if exact else _MAGNITUDES[call.name](repeated, values)
    sizes = sizes_of(repeated)
    allowed = []
    for index, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if spec.tolerance.exact:
            allowed.append(_of_conversion(repeated, index, value))
        else:
            allowed.append(_allowed(magnitudes[index], spec, sizes, precisions).expand(value.shape))
    return allowed


def terms_of(repeated: RepeatedCall, output: int) -> int:
    """How many terms the sum behind a value of an output has; 1 where there is none."""
    terms = _outputs_of(repeated.call.name)[output].tolerance.terms
    return max(evaluate(terms, sizes_of(repeated)), 1) if terms else 1


def sizes_of(repeated: RepeatedCall) -> dict[str, int]:
    """All symbols of the call: as it was bound, and as its inputs show."""
    call = repeated.call
    sizes = dict(call.sizes)
    for tensor in CATALOGUE[call.name].inputs:
        value = call.inputs.get(tensor.name)
        if isinstance(value, Tensor):
            named = zip(tensor.shape, value.shape, strict=True)
            sizes.update({symbol: size for symbol, size in named if len(symbol) == 1 and symbol.isalpha()})
    if "start" in call.inputs:
        sizes["X"] = call.inputs["start"]
    return sizes


def _outputs_of(name: str) -> Sequence[TensorSpec]:
    """An operator without outputs shows the input that it writes to."""
    spec = CATALOGUE[name]
    return spec.outputs or [each for each in spec.inputs if each.name in spec.writes]


def _allowed(
    magnitudes: Magnitudes, spec: TensorSpec, sizes: Mapping[str, int], precisions: Sequence[Precision]
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64) + magnitudes.slack
    for side in precisions:
        by_rounding, by_sum = spec.tolerance.coefficients(side.dtype, side.accumulation, sizes)
        underflow = SMALLEST_NORMAL[side.dtype] * magnitudes.underflow
        total = total + by_rounding * magnitudes.rounded + by_sum * magnitudes.summed + underflow
    return total


def _of_conversion(repeated: RepeatedCall, index: int, value: Tensor) -> Tensor:
    """Of an output that has to be equal: nothing, or one rounding where the sides hold it in two dtypes."""
    held = {
        str(side[index].dtype).removeprefix("torch.") for side in (repeated.call.outputs, repeated.outputs)
    }
    if len(held) == 1:
        return torch.zeros_like(value)
    return max(UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in held) * value.abs()


def _linear(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    bias = _bias(repeated)
    rounded = torch.maximum(values[0].abs(), (values[0] - bias).abs())
    return [Magnitudes(rounded, _product(repeated) + bias.abs())]


def _linear_w8a8(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    rounded = torch.maximum(values[0].abs(), (values[0] - _bias(repeated)).abs())
    assert repeated.weights is not None
    ties, step = _ties_of_int8(repeated.call.inputs["x"].double())
    weights = repeated.weights
    slack = step * torch.minimum(ties * weights.largest, ties.sqrt() * weights.length)
    return [Magnitudes(rounded, rounded, slack=slack)]


def _linear_w4a16(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    plain = _linear(repeated, values)[0]
    assert repeated.weights is not None
    # The root of the summed squares of x w is at most |x|'s length times the row's largest weight.
    root = _length(repeated.call.inputs["x"]) * repeated.weights.largest
    return [Magnitudes(torch.maximum(plain.rounded, root), plain.summed)]


def _qkv_rotary(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    query, key, value = values
    rows, size = query.shape[0], query.shape[-1]
    split = [query.shape[1], key.shape[1], value.shape[1]]
    bias = _bias(repeated).expand(rows, sum(split) * size).reshape(rows, -1, size)
    summed = _product(repeated).reshape(rows, -1, size) + bias.abs()
    biases, sums_by_part = torch.split(bias, split, 1), torch.split(summed, split, 1)
    turned = [
        Magnitudes(_pairs(each) + _pairs(part), _pairs(sums))
        for each, part, sums in zip((query, key), biases, sums_by_part, strict=False)
    ]
    rounded = torch.maximum(value.abs(), (value - biases[2]).abs())
    return [*turned, Magnitudes(rounded, sums_by_part[2])]


def _rms_norm(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    size = values[0].abs()
    return [Magnitudes(size, size, 1 + repeated.own["weight"].double().cpu().abs())]


def _add_rms_norm(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    total = values[1].abs()
    return [*_rms_norm(repeated, values), Magnitudes(total, torch.zeros_like(total))]


def _rotary(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    return [Magnitudes(_pairs(each), torch.zeros_like(each)) for each in values]


def _silu_mul(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    gate, up = repeated.call.inputs["gate_up"].double().abs().chunk(2, dim=-1)
    size = values[0].abs()
    return [Magnitudes(size, (1 + gate) * size, (1 + gate) * (1 + up))]


def _gelu_mul(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    gate, up = repeated.call.inputs["gate_up"].double().abs().chunk(2, dim=-1)
    return [Magnitudes(values[0].abs(), gate * up, (1 + gate) * (1 + up))]


def _attention_prefill(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    given = repeated.call.inputs
    return [_attended(given["query"], given["page_ids"], given["start"], given)]


def _attention_decode(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    given = repeated.call.inputs
    found = [
        _attended(given["query"][row : row + 1], pages, length - 1, given)
        for row, (pages, length) in enumerate(
            zip(given["page_table"], given["lengths"].tolist(), strict=True)
        )
    ]
    return [
        Magnitudes(torch.cat([each.rounded for each in found]), torch.cat([each.summed for each in found]))
    ]


def _attended(query: Tensor, pages: Tensor, start: int, given: Mapping[str, Any]) -> Magnitudes:
    """Of one sequence's run of tokens: the sum of p |v|, and that times 1 + 2 |q| |k| scale."""
    keys, values = given["kv_cache"].float()
    cells = torch.stack((keys, values.abs()))
    scale = given["scale"]
    bounds = (given.get("window", 0), given.get("soft_cap", 0.0))
    attended = reference.attention_prefill_bounded(query.float(), cells, pages, start, scale, *bounds)
    rounded = attended.double()
    # The cells behind the last one hold zeros or what is newer: the bound stays a bound.
    longest = _length(keys[pages]).amax(dim=(0, 1)).flatten()
    scores = _length(query) * longest.repeat_interleave(query.shape[1] // len(longest)).unsqueeze(-1) * scale
    return Magnitudes(rounded, rounded * (1 + 2 * scores))


def _moe_route(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    """An error of the largest logit moves every weight by its share."""
    logits = repeated.call.inputs["router_logits"].double().abs().amax(dim=-1, keepdim=True)
    weights = values[0].abs()
    return [Magnitudes(weights, weights * (1 + 2 * logits)), Magnitudes(values[1], values[1])]


def _experts(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    """Nothing is known of what lies between the two products, and weights are opaque: errors of the inner
    values, several roundings each, reach y as much as the values do: in shares of a row's root mean square.
    """
    size = torch.maximum(values[0].abs(), values[0].square().mean(dim=-1, keepdim=True).sqrt())
    return [Magnitudes(_INNER_ROUNDINGS * size, size)]


def _experts_w8a8(repeated: RepeatedCall, values: Sequence[Tensor]) -> list[Magnitudes]:
    """As _experts. Roundings also take inner values over a tie of int8, the more of them the shorter the
    dtype is, and one at least.
    """
    plain = _experts(repeated, values)[0]
    roundoff = UNIT_ROUNDOFF[str(repeated.call.outputs[0].dtype).removeprefix("torch.")]
    share = min(1.0, _LEVELS_PER_ROUNDOFF * roundoff) ** 0.5 + repeated.call.sizes["I"] ** -0.5
    return [replace(plain, slack=_STEPS * share * plain.summed)]


_MAGNITUDES: Mapping[str, Callable[[RepeatedCall, Sequence[Tensor]], list[Magnitudes]]] = {
    "linear": _linear,
    "linear_w8a8": _linear_w8a8,
    "linear_w4a16": _linear_w4a16,
    "moe_experts": _experts,
    "moe_experts_w8a8": _experts_w8a8,
    "moe_experts_w4a16": _experts,
    "qkv_rotary": _qkv_rotary,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary": _rotary,
    "silu_mul": _silu_mul,
    "attention_prefill": _attention_prefill,
    "attention_decode": _attention_decode,
    "gelu_mul": _gelu_mul,
    "attention_prefill_bounded": _attention_prefill,
    "attention_decode_bounded": _attention_decode,
    "moe_route": _moe_route,
}


def _bias(repeated: RepeatedCall) -> Tensor:
    bias = repeated.own.get("bias")
    return torch.zeros(1, dtype=torch.float64) if bias is None else bias.double().cpu()


def _product(repeated: RepeatedCall) -> Tensor:
    """At least |x| |W|^T, [t, out]."""
    assert repeated.weights is not None
    return _length(repeated.call.inputs["x"]) * repeated.weights.length


def _ties_of_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row [t, 1]: how many values lie between two int8 steps, as float32 sees it, and the step."""
    step = x.abs().amax(dim=-1, keepdim=True) / LEVELS
    levels = x / torch.where(step > 0, step, 1.0)
    ties = (levels - levels.floor() - 0.5).abs() <= _NEAR_A_TIE
    return ties.sum(dim=-1, keepdim=True).double(), step


def _length(rows: Tensor) -> Tensor:
    """[..., n] -> [..., 1]."""
    length: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1, keepdim=True)
    return length


def _pairs(values: Tensor) -> Tensor:
    """The length of each rotated pair [..., d]: kept by rotation, and at least |first cos| + |second sin|."""
    first, second = values.chunk(2, dim=-1)
    length = torch.hypot(first, second)
    return torch.cat((length, length), dim=-1)
