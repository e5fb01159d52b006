"""The operator catalogue as data: signatures, shape classes and tolerances of every operator. No torch.

Meaning of each operator: plugins.sdk.reference. How wrong a result may be, and why, stands in `Tolerance`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
class OpSpec:
    """One operator. `inputs`, then `attributes`, are its parameters in the order of OperatorSet.

    writes: inputs that it changes; all others it leaves alone. fused_from: its parts, where it is a fused
    form. dtypes: compute dtypes; where no tensor has the dtype COMPUTE, the one that its inputs have.
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
    constraints: Sequence[str] = ()

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


def _classes(symbols: str, rows: Mapping[str, Sequence[int]], heavy: Sequence[str] = ()) -> list[ShapeClass]:
    """Shape classes from a table: the symbols in order, then one row of sizes for each class."""
    names = symbols.split()
    return [
        ShapeClass(name, dict(zip(names, sizes, strict=True)), heavy=name in heavy)
        for name, sizes in rows.items()
    ]


# Rows of a step: one token, a decode batch, a prefill chunk, sizes that divide by nothing.
_HIDDEN = _classes(
    "T K",
    {"decode_one": (1, 576), "decode_batch": (8, 576), "prefill": (96, 576), "odd": (5, 63),
     "wide": (4, 4096), "prefill_long": (512, 2048)},
    heavy=["prefill_long"],
)  # fmt: skip
_LINEAR = _classes(
    "T K N",
    {"decode_one": (1, 576, 960), "decode_batch": (8, 576, 1536), "prefill": (96, 576, 576),
     "odd": (5, 63, 37), "deep": (4, 4096, 256), "prefill_long": (512, 2048, 2048)},
    heavy=["prefill_long"],
)  # fmt: skip
_GATE = _classes(
    "T I",
    {"decode_one": (1, 1536), "decode_batch": (8, 1536), "prefill": (96, 1536), "odd": (5, 37),
     "prefill_long": (512, 8192)},
    heavy=["prefill_long"],
)  # fmt: skip
_EMBEDDING = _classes(
    "T V K",
    {"decode_one": (1, 1000, 576), "prefill": (96, 1000, 576), "odd": (5, 7, 63),
     "vocabulary": (64, 49152, 576)},
    heavy=["vocabulary"],
)  # fmt: skip
_ROTARY = _classes(
    "T H G D C",
    {"mha_d64": (1, 4, 4, 64, 128), "gqa3_d64": (40, 9, 3, 64, 256), "gqa8_d128": (8, 8, 1, 128, 256),
     "odd": (5, 3, 1, 40, 33), "prefill_long": (512, 32, 8, 128, 4096)},
    heavy=["prefill_long"],
)  # fmt: skip
# P pages in the cache, S tokens of a page, G key/value heads.
_WRITE = _classes(
    "T P S G D",
    {"decode_one": (1, 4, 16, 3, 64), "decode_batch": (8, 12, 16, 1, 128), "prefill": (40, 6, 16, 3, 64),
     "odd": (7, 5, 3, 1, 40), "prefill_long": (512, 64, 16, 8, 128)},
    heavy=["prefill_long"],
)  # fmt: skip
# X tokens are in the cache before the run of T; M pages hold X + T tokens.
_PREFILL = _classes(
    "T X H G D P S M",
    {"mha_d64": (16, 0, 4, 4, 64, 3, 16, 1), "gqa3_d64_chunk": (24, 40, 9, 3, 64, 9, 16, 4),
     "gqa8_d128": (33, 0, 8, 1, 128, 5, 16, 3), "last_token": (1, 63, 9, 3, 64, 6, 16, 4),
     "odd": (7, 10, 3, 1, 40, 11, 3, 6), "prefill_long": (512, 512, 9, 3, 64, 70, 16, 64)},
    heavy=["prefill_long"],
)  # fmt: skip
# B sequences of at most M pages each.
_DECODE = _classes(
    "B H G D P S M",
    {"one_gqa3_d64": (1, 9, 3, 64, 6, 16, 4), "batch_mha_d64": (4, 4, 4, 64, 24, 16, 3),
     "batch_gqa8_d128": (8, 8, 1, 128, 40, 16, 5), "odd": (5, 3, 1, 40, 23, 3, 4),
     "batch_long": (32, 9, 3, 64, 512, 16, 64)},
    heavy=["batch_long"],
)  # fmt: skip
_LOGITS = _classes(
    "R V",
    {"one": (1, 1000), "batch": (8, 4096), "odd": (5, 37), "vocabulary": (4, 49152),
     "batch_long": (16, 151936)},
    heavy=["batch_long"],
)  # fmt: skip

_LINEAR_TOLERANCE = Tolerance(
    roundings=2, rounded="the larger of |y| and |x W^T|", terms="K", summed="|x| |W|^T + |bias|"
)
_NORM_TOLERANCE = Tolerance(roundings=2, rounded="|y|", terms="K", summed="|y|")
_ADD_NORM_TOLERANCE = Tolerance(roundings=3, rounded="|y|, and its sum's rounding", terms="K", summed="|y|")
_SUM_TOLERANCE = Tolerance(roundings=1, rounded="|x + residual|")
_ROTARY_TOLERANCE = Tolerance(roundings=3, rounded="|first cos| + |second sin|, or as the half has it")
_GATE_TOLERANCE = Tolerance(roundings=2, rounded="|y|", terms="1", summed="(1 + |gate|) |y|")
_ATTENTION = "sum of p |v| * (1 + 2 * the largest |q| |k| * scale): an error of a score moves its weight"
_PREFILL_TOLERANCE = Tolerance(
    roundings=3, rounded="sum of p |v|: weights, sum and result", terms="D+X+T", summed=_ATTENTION
)
_DECODE_TOLERANCE = Tolerance(
    roundings=3, rounded="sum of p |v|: weights, sum and result", terms="D+M*S", summed=_ATTENTION
)
_CACHE = TensorSpec("kv_cache", ("2", "P", "S", "G", "D"), KV)

CATALOGUE: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec(
            name="embedding",
            summary="rows of a table",
            inputs=(TensorSpec("token_ids", ("T",), "int64"), TensorSpec("weight", ("V", "K"))),
            outputs=(TensorSpec("rows", ("T", "K")),),
            shape_classes=_EMBEDDING,
        ),
        OpSpec(
            name="linear",
            summary="x W^T + bias",
            inputs=(
                TensorSpec("x", ("T", "K")),
                TensorSpec("weight", ("N", "K")),
                TensorSpec("bias", ("N",), optional=True),
            ),
            outputs=(TensorSpec("y", ("T", "N"), tolerance=_LINEAR_TOLERANCE),),
            shape_classes=_LINEAR,
        ),
        OpSpec(
            name="rms_norm",
            summary="root-mean-square normalisation",
            inputs=(TensorSpec("x", ("T", "K")), TensorSpec("weight", ("K",))),
            attributes=(AttributeSpec("eps", "float"),),
            outputs=(TensorSpec("y", ("T", "K"), tolerance=_NORM_TOLERANCE),),
            shape_classes=_HIDDEN,
        ),
        OpSpec(
            name="add_rms_norm",
            summary="residual addition and its normalisation",
            inputs=(
                TensorSpec("x", ("T", "K")),
                TensorSpec("residual", ("T", "K")),
                TensorSpec("weight", ("K",)),
            ),
            attributes=(AttributeSpec("eps", "float"),),
            outputs=(
                TensorSpec("y", ("T", "K"), tolerance=_ADD_NORM_TOLERANCE),
                TensorSpec("total", ("T", "K"), tolerance=_SUM_TOLERANCE),
            ),
            shape_classes=_HIDDEN,
            fused_from=("add", "rms_norm"),
        ),
        OpSpec(
            name="rotary",
            summary="rotary position embedding of query and key",
            inputs=(
                TensorSpec("query", ("T", "H", "D")),
                TensorSpec("key", ("T", "G", "D")),
                TensorSpec("positions", ("T",), "int64"),
                TensorSpec("cos_sin", ("C", "D"), "float32"),
            ),
            outputs=(
                TensorSpec("query", ("T", "H", "D"), tolerance=_ROTARY_TOLERANCE),
                TensorSpec("key", ("T", "G", "D"), tolerance=_ROTARY_TOLERANCE),
            ),
            shape_classes=_ROTARY,
            constraints=("D % 2 == 0",),
        ),
        OpSpec(
            name="silu_mul",
            summary="silu(gate) * up",
            inputs=(TensorSpec("gate_up", ("T", "2*I")),),
            outputs=(TensorSpec("y", ("T", "I"), tolerance=_GATE_TOLERANCE),),
            shape_classes=_GATE,
            fused_from=("silu", "mul"),
        ),
        OpSpec(
            name="write_kv",
            summary="keys and values into cells of the paged cache, and into no other",
            inputs=(
                TensorSpec("key", ("T", "G", "D")),
                TensorSpec("value", ("T", "G", "D")),
                _CACHE,
                TensorSpec("cells", ("T",), "int64"),
            ),
            outputs=(),
            writes=("kv_cache",),
            shape_classes=_WRITE,
        ),
        OpSpec(
            name="attention_prefill",
            summary="causal attention of one sequence's run of tokens",
            inputs=(TensorSpec("query", ("T", "H", "D")), _CACHE, TensorSpec("page_ids", ("M",), "int64")),
            attributes=(AttributeSpec("start", "int"), AttributeSpec("scale", "float")),
            outputs=(TensorSpec("attended", ("T", "H", "D"), tolerance=_PREFILL_TOLERANCE),),
            shape_classes=_PREFILL,
            constraints=("H % G == 0",),
        ),
        OpSpec(
            name="attention_decode",
            summary="attention of one token of each sequence",
            inputs=(
                TensorSpec("query", ("B", "H", "D")),
                _CACHE,
                TensorSpec("page_table", ("B", "M"), "int64"),
                TensorSpec("lengths", ("B",), "int64"),
                TensorSpec("mask", ("B", "M*S")),
            ),
            attributes=(AttributeSpec("scale", "float"),),
            outputs=(TensorSpec("attended", ("B", "H", "D"), tolerance=_DECODE_TOLERANCE),),
            shape_classes=_DECODE,
            constraints=("H % G == 0",),
        ),
        OpSpec(
            name="argmax",
            summary="the token of the largest logit, the lowest id among equals",
            inputs=(TensorSpec("logits", ("R", "V"), "float32"),),
            outputs=(TensorSpec("token_ids", ("R",), "int64"),),
            dtypes=("float32",),
            shape_classes=_LOGITS,
        ),
        OpSpec(
            name="sample",
            summary="temperature, top-k, top-p, min-p, then a draw by inverse distribution",
            inputs=(
                TensorSpec("logits", ("R", "V"), "float32"),
                TensorSpec("temperature", ("R",), "float32"),
                TensorSpec("top_k", ("R",), "int64"),
                TensorSpec("top_p", ("R",), "float32"),
                TensorSpec("min_p", ("R",), "float32"),
                TensorSpec("uniform", ("R",), "float64"),
            ),
            outputs=(TensorSpec("token_ids", ("R",), "int64"),),
            dtypes=("float32",),
            shape_classes=_LOGITS,
            fused_from=("temperature", "top_k", "top_p", "min_p", "draw"),
        ),
    )
}
