"""Compares what a chip returned with what an operator is, and says what kind of fault a difference is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plugins.conformance.cases import Case
from plugins.conformance.definitions import acceptable_tokens
from plugins.conformance.definitions_expected import Expected, Ranking
from plugins.conformance.recorder import CheckFailed, require
from plugins.conformance.report import Fault
from plugins.sdk.catalogue import COMPUTE, LARGEST, SMALLEST_NORMAL, UNIT_ROUNDOFF, TensorSpec, evaluate

_LOWER = "bfloat16"
_SYSTEMATIC = 0.3
"""Correlation of error and value above which an error is a wrong factor rather than rounding."""

_WORST_SUM = 0.5
"""An error of this times sqrt(n) * u has more behind it than n sums in a shorter dtype."""

_FACTOR = 0.005
"""Off in common by more than this, results have a wrong scale: rounding to bfloat16 hides it in each."""
_CHANCE = 5.0
"""Deviations that chance is granted."""


def compare_outputs(
    outputs: tuple[Tensor, ...], expected: tuple[Expected, ...], case: Case, *, accumulation: str
) -> float:
    """Check form, finiteness and values; returns the largest error in tolerances.

    accumulation: dtype of sums, as the capability report declares it.

    Raises:
        CheckFailed: the first fault found.
    """
    specs = case.spec.outputs
    require(
        len(outputs) == len(specs), Fault.WRONG_FORM, f"{len(outputs)} outputs; the operator has {len(specs)}"
    )
    worst = 0.0
    for output, wanted, spec in zip(outputs, expected, specs, strict=True):
        _check_form(output, spec, case)
        if wanted.ranking is not None:
            _check_ranked(output, wanted.value, wanted.ranking, spec)
            continue
        if not output.is_floating_point():
            _check_equal(output, wanted.value, spec)
            continue
        _check_finite(output, wanted, spec, case)
        if spec.tolerance.exact:
            _check_equal(output.double(), wanted.value, spec)
        else:
            worst = max(worst, _check_close(output.double(), wanted, spec, case, accumulation))
    return worst


def check_tokens(output: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Tokens of `sample`: each among those that the draw allows."""
    for row, (token, allowed) in enumerate(zip(output.tolist(), acceptable_tokens(inputs), strict=True)):
        require(
            token in allowed,
            Fault.WRONG_RESULT,
            f"row {row}: token {token}; the definition draws {sorted(allowed)}",
        )


def _check_form(output: Tensor, spec: TensorSpec, case: Case) -> None:
    wanted_shape = spec.sizes(case.shape_class.sizes)
    wanted_dtype = _dtype(spec, case)
    found = (tuple(output.shape), str(output.dtype).removeprefix("torch."))
    require(
        found == (wanted_shape, wanted_dtype),
        Fault.WRONG_FORM,
        f"{spec.name} is {found[1]} {list(found[0])}; it has to be {wanted_dtype} {list(wanted_shape)}",
    )


def _dtype(spec: TensorSpec, case: Case) -> str:
    return case.dtype if spec.dtype == COMPUTE else spec.dtype


def _check_equal(output: Tensor, wanted: Tensor, spec: TensorSpec) -> None:
    wrong = output != wanted
    count = int(wrong.sum())
    if count:
        where = _first(wrong)
        raise CheckFailed(
            Fault.WRONG_RESULT,
            f"{spec.name}: {count} of {wrong.numel()} elements differ where all have to be equal; "
            f"at {where}: {output[where].item()}, not {wanted[where].item()}",
        )


def _check_ranked(output: Tensor, wanted: Tensor, ranking: Ranking, spec: TensorSpec) -> None:
    """Ids in falling order of their scores; near equals in any order, equals with the lowest id first."""
    for row, (ids, exact) in enumerate(zip(output.tolist(), wanted.tolist(), strict=True)):
        fault = _misranked(ids, exact, ranking, row)
        require(not fault, Fault.WRONG_RESULT, f"{spec.name} of row {row} are {ids}, not {exact}: {fault}")


def _misranked(ids: list[int], exact: list[int], ranking: Ranking, row: int) -> str:
    keys, scores, doubt = (each[row].tolist() for each in (ranking.keys, ranking.scores, ranking.doubt))
    if len(set(ids)) < len(ids) or not all(0 <= each < len(keys) for each in ids):
        return f"they have to be different ones from 0 to {len(keys) - 1}"
    for place, (one, right) in enumerate(zip(ids, exact, strict=True)):
        if abs(scores[one] - scores[right]) > doubt[one] + doubt[right]:
            return f"place {place} has a score of {scores[one]:.6g} in place of {scores[right]:.6g}"
    for one in ids:
        equals = [each for each in ids if keys[each] == keys[one]]
        lowest = [each for each, key in enumerate(keys) if key == keys[one]]
        if equals != lowest[: len(equals)]:
            return f"among the equals {lowest} the lowest id comes first"
    return ""


def _check_finite(output: Tensor, wanted: Expected, spec: TensorSpec, case: Case) -> None:
    representable = wanted.value.abs() <= LARGEST[_dtype(spec, case)]
    bad = ~torch.isfinite(output) & representable
    count = int(bad.sum())
    if count:
        where = _first(bad)
        raise CheckFailed(
            Fault.NON_FINITE,
            f"{spec.name}: {count} elements are not finite, though inputs and results are; at {where}: "
            f"{output[where].item()}, not {wanted.value[where].item():.6g}",
        )


def _check_close(output: Tensor, wanted: Expected, spec: TensorSpec, case: Case, accumulation: str) -> float:
    """The largest error, in tolerances."""
    error = torch.where(torch.isfinite(output), output - wanted.value, 0.0)
    slack = wanted.slack if wanted.slack is not None else torch.zeros_like(error)
    allowed = _allowed(wanted, spec, case, accumulation)
    ratio = (error.abs() - slack).clamp(min=0.0) / allowed
    worst = float(ratio.max())
    if worst > 1.0:
        where = _first(ratio == ratio.max())
        rows = (ratio > 1).any(dim=-1)
        fault, hint = _classify(error[rows], wanted.value[rows], spec, case, accumulation)
        raise CheckFailed(
            fault,
            f"{spec.name}: {int((ratio > 1).sum())} of {ratio.numel()} elements out of tolerance{hint}; at "
            f"{where}: {output[where].item():.9g}, not {wanted.value[where].item():.9g}, error "
            f"{error[where].item():.3g}, allowed {(allowed + slack)[where].item():.3g}",
        )
    factor = _common_factor(error, wanted.value, allowed + slack)
    require(
        abs(factor) <= _FACTOR,
        Fault.WRONG_RESULT,
        f"{spec.name}: each element is within its tolerance, but all are off by the factor {1 + factor:.4f}",
    )
    return worst


def _common_factor(error: Tensor, value: Tensor, allowed: Tensor) -> float:
    """By which share of their values all elements are off in common; 0 where chance could do that: errors
    without direction, most of them half of what is allowed, make one of 0.5 / sqrt(sum of (value/allowed)^2).
    """
    weight = float((value / allowed).square().sum())
    if not weight:
        return 0.0
    factor = float((error * value / allowed.square()).sum()) / weight
    return factor if abs(factor) > _CHANCE * 0.5 / weight**0.5 else 0.0


def _allowed(wanted: Expected, spec: TensorSpec, case: Case, accumulation: str) -> Tensor:
    by_rounding, by_sum = spec.tolerance.coefficients(case.dtype, accumulation, case.shape_class.sizes)
    rounded = wanted.rounded if wanted.rounded is not None else wanted.value.abs()
    summed = wanted.summed if wanted.summed is not None else wanted.value.abs()
    underflow = wanted.underflow if wanted.underflow is not None else torch.ones_like(rounded)
    smallest = SMALLEST_NORMAL[_dtype(spec, case)]
    return by_rounding * rounded + by_sum * summed + smallest * underflow


def _classify(
    error: Tensor, value: Tensor, spec: TensorSpec, case: Case, accumulation: str
) -> tuple[Fault, str]:
    """Random and of the size that sums in a shorter dtype make: the accumulation; else the result is wrong.

    error, value: of the rows that are out of tolerance. Rounding n partial sums makes an error of about
    0.3 sqrt(n) * u * |value| without any direction (each is 0.4 u of a partial sum that grows to |value|);
    a wrong factor, order or index makes one that goes with the value or is as large as the value.
    """
    terms = evaluate(spec.tolerance.terms, case.shape_class.sizes) if spec.tolerance.terms else 0
    shorter = UNIT_ROUNDOFF[_LOWER]
    if terms < 2 or UNIT_ROUNDOFF[accumulation] >= shorter:
        return Fault.WRONG_RESULT, ""
    # Rows of zeros say nothing, and a large row must not speak for all: each is measured by its own size.
    scale = value.square().mean(dim=-1, keepdim=True).sqrt()
    rows = scale.expand_as(value) > 0
    wrong, right = (error / scale)[rows], (value / scale)[rows]
    if not wrong.numel():
        return Fault.WRONG_RESULT, ""
    size = float(wrong.square().mean().sqrt())
    direction = abs(float((wrong * right).mean())) / max(size, 1e-300)
    by_chance = min(3.0 / wrong.numel() ** 0.5, 0.95)
    largest = float((error.square().mean(dim=-1, keepdim=True).sqrt() / scale)[scale > 0].max())
    if direction < max(_SYSTEMATIC, by_chance) and largest <= _WORST_SUM * terms**0.5 * shorter:
        return Fault.WRONG_ACCUMULATION, (
            f", by errors without direction as sums of {_LOWER} make them; the report says that sums are "
            f"{accumulation}"
        )
    return Fault.WRONG_RESULT, ""


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(where)[0].tolist())
