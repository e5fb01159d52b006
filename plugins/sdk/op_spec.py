"""What the catalogue says of an operator: signature, shape classes, tolerance, parts. No torch."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

COMPUTE = "compute"
"""In place of a dtype: the model's compute dtype, one of the operator's `dtypes`."""
KV = "kv"
"""In place of a dtype: the dtype of the KV cache."""

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding to nearest: half the distance from 1 to the next number."""
SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}
"""Below it chips may flush to zero, so that errors of this size are nobody's fault."""
LARGEST = {"float64": 1.7e308, "float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38}
"""About the largest finite number: what is larger may become infinite."""


_LAMBDA = 4.0


@dataclass(frozen=True)
class Tolerance:
    """How far an output may lie from the exact one (float64 arithmetic on the same inputs), by element:

        |got - exact| <= roundings * u(dtype) * rounded + 4 * sqrt(terms) * u(accumulation) * summed

    u: UNIT_ROUNDOFF. The first part is for results and intermediates that are stored in the compute dtype.
    The second is the probabilistic bound on sums of n terms, lambda * sqrt(n) * u times the sum of magnitudes
    (Higham & Mary, "A new approach to probabilistic rounding error analysis", SISC 2019), with lambda = 4.
    accumulation: what the capability report declares, so a chip may accumulate in less if it says so.
    `rounded`, `summed`: in words what the two magnitudes are; plugins.conformance.definitions computes them.
    roundings 0 and terms "": every bit has to agree.
    """

    roundings: int = 0
    rounded: str = ""
    terms: str = ""
    summed: str = ""

    @property
    def exact(self) -> bool:
        """Whether every bit has to agree."""
        return not self.roundings and not self.terms

    def coefficients(self, dtype: str, accumulation: str, sizes: Mapping[str, int]) -> tuple[float, float]:
        """The factors of `rounded` and of `summed`, for one dtype and the sizes of a shape class."""
        if self.exact:
            return 0.0, 0.0
        accumulated = max(UNIT_ROUNDOFF[accumulation], UNIT_ROUNDOFF["float64"])
        terms = evaluate(self.terms, sizes) if self.terms else 0
        return self.roundings * UNIT_ROUNDOFF[dtype], _LAMBDA * sqrt(terms) * accumulated


EXACT = Tolerance()


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a signature. shape: symbols, numbers and products such as "2*I". dtype: COMPUTE, KV or one
    of the contract.
    """

    name: str
    shape: Sequence[str]
    dtype: str = COMPUTE
    optional: bool = False
    tolerance: Tolerance = EXACT
    """Of an output."""

    def sizes(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(evaluate(size, symbols) for size in self.shape)


@dataclass(frozen=True)
class AttributeSpec:
    """A plain number of a signature. kind: "int" or "float"."""

    name: str
    kind: str


@dataclass(frozen=True)
class ShapeClass:
    """Concrete sizes under a name that reports carry. heavy: left out of quick runs."""

    name: str
    sizes: Mapping[str, int]
    heavy: bool = False


@dataclass(frozen=True)
class PartSpec:
    """An operator of the catalogue that a fused one is made of.

    role: as plugins.sdk.reference.fused names it. sizes: the part's symbols as expressions in the fused
    operator's. weights: the part's weight parameters, by the fused operator's parameter that brings them.
    stacked: those weights have a leading dimension of experts, of which the part sees one at a time.
    """

    role: str
    operator: str
    sizes: Mapping[str, str]
    weights: Mapping[str, str] = field(default_factory=dict)
    stacked: bool = False


STEP_SYMBOLS = frozenset("TBXMPR")
"""Sizes that change from step to step, in every signature; all others are fixed by the model or the page
size, and only those may be constrained by a chip: a kernel that cannot take few rows pads them itself.
"""


@dataclass(frozen=True)
class OpSpec:
    """One operator. `inputs`, then `attributes`, are its parameters in the order of OperatorSet.

    writes: inputs that it changes; all others it leaves alone. dtypes: compute dtypes; where no tensor has
    the dtype COMPUTE, the one that its inputs have. fused_from: what it is a fused form of, in words; parts:
    those of them that are operators themselves. weights: inputs that are a model's weights, which a chip may
    hold in another form. padded: symbols that the framework can pad. structural: symbols that decide how a
    model's state lies on the chip; a chip that cannot take them is refused rather than run by the reference.
    """

    name: str
    summary: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    shape_classes: Sequence[ShapeClass]
    attributes: Sequence[AttributeSpec] = ()
    writes: Sequence[str] = ()
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16")
    fused_from: Sequence[str] = ()
    parts: Sequence[PartSpec] = ()
    constraints: Sequence[str] = ()
    weights: Sequence[str] = ()
    padded: Sequence[str] = ()
    structural: Sequence[str] = ()

    @property
    def fixed_symbols(self) -> frozenset[str]:
        """Symbols of its signature that do not change from step to step."""
        return frozenset(self.shape_classes[0].sizes) - STEP_SYMBOLS

    @property
    def follows_compute_dtype(self) -> bool:
        """Whether any of its tensors has the model's compute dtype."""
        return any(tensor.dtype == COMPUTE for tensor in (*self.inputs, *self.outputs))


def evaluate(expression: str, symbols: Mapping[str, int]) -> int:
    """A sum of products of symbols and numbers, such as "D+P*S". Raises KeyError for an unknown symbol."""
    return sum(
        prod(int(factor) if factor.isdigit() else symbols[factor] for factor in term.split("*"))
        for term in expression.split("+")
    )


_OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, several: value in several,
    ast.NotIn: lambda value, several: value not in several,
}


def holds(constraint: str, symbols: Mapping[str, int]) -> bool:
    """Whether a constraint such as "D % 16 == 0 and S in (16, 64)" is met. Symbols of other operators than
    the one asked for are an error: nothing would check them.

    Raises:
        ValueError: it is no such expression, or names a symbol that `symbols` has not.
    """
    try:
        return bool(_value(ast.parse(constraint, mode="eval").body, symbols))
    except (SyntaxError, KeyError, ZeroDivisionError, TypeError) as error:
        raise ValueError(
            f"constraint {constraint!r} cannot be read: {error}; it may compare numbers and the symbols "
            f"{', '.join(symbols)} with + - * // % == != < <= > >= in, and, or"
        ) from error


def _value(node: ast.expr, symbols: Mapping[str, int]) -> Any:
    """A number, truth value or tuple. Nothing else can be written, so that a report cannot run code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return symbols[node.id]
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(each, symbols) for each in node.elts)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, symbols), _value(node.right, symbols)
        return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.BoolOp):
        parts = [bool(_value(each, symbols)) for each in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Compare):
        values = [_value(each, symbols) for each in (node.left, *node.comparators)]
        pairs = zip(node.ops, values, values[1:], strict=False)
        return all(_OPERATIONS[type(one)](left, right) for one, left, right in pairs)
    raise TypeError(f"{ast.unparse(node)!r} is not allowed")


def symbols_of(constraint: str) -> frozenset[str]:
    """The symbols that a constraint names. Raises ValueError where it is no expression."""
    try:
        tree = ast.parse(constraint, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"constraint {constraint!r} cannot be read: {error}") from error
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
