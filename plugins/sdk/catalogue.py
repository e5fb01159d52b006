"""The operator catalogue as data: signatures, shape classes and tolerances of every operator. No torch.

Meaning of each operator: plugins.sdk.reference. How wrong a result may be, and why: `Tolerance` of op_spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plugins.sdk.op_spec import (
    COMPUTE,
    KV,
    LARGEST,
    SMALLEST_NORMAL,
    STEP_SYMBOLS,
    UNIT_ROUNDOFF,
    AttributeSpec,
    OpSpec,
    PartSpec,
    ShapeClass,
    TensorSpec,
    Tolerance,
    evaluate,
    holds,
    symbols_of,
)

__all__ = [
    "CATALOGUE", "COMPUTE", "KV", "LARGEST", "SMALLEST_NORMAL", "STEP_SYMBOLS", "UNIT_ROUNDOFF",
    "AttributeSpec", "OpSpec", "PartSpec", "ShapeClass", "TensorSpec", "Tolerance", "evaluate", "holds",
    "symbols_of",
]  # fmt: skip


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
     "odd": (7, 5, 3, 1, 40), "page64": (9, 3, 64, 2, 64), "prefill_long": (512, 64, 16, 8, 128)},
    heavy=["prefill_long"],
)  # fmt: skip
# X tokens are in the cache before the run of T; M pages hold X + T tokens.
_PREFILL = _classes(
    "T X H G D P S M",
    {"mha_d64": (16, 0, 4, 4, 64, 3, 16, 1), "gqa3_d64_chunk": (24, 40, 9, 3, 64, 9, 16, 4),
     "gqa8_d128": (33, 0, 8, 1, 128, 5, 16, 3), "last_token": (1, 63, 9, 3, 64, 6, 16, 4),
     "odd": (7, 10, 3, 1, 40, 11, 3, 6), "page64": (20, 70, 4, 2, 64, 4, 64, 2),
     "prefill_long": (512, 512, 9, 3, 64, 70, 16, 64)},
    heavy=["prefill_long"],
)  # fmt: skip
# B sequences of at most M pages each.
_DECODE = _classes(
    "B H G D P S M",
    {"one_gqa3_d64": (1, 9, 3, 64, 6, 16, 4), "batch_mha_d64": (4, 4, 4, 64, 24, 16, 3),
     "batch_gqa8_d128": (8, 8, 1, 128, 40, 16, 5), "odd": (5, 3, 1, 40, 23, 3, 4),
     "page64": (3, 4, 2, 64, 7, 64, 2), "batch_long": (32, 9, 3, 64, 512, 16, 64)},
    heavy=["batch_long"],
)  # fmt: skip
_LOGITS = _classes(
    "R V",
    {"one": (1, 1000), "batch": (8, 4096), "odd": (5, 37), "vocabulary": (4, 49152),
     "batch_long": (16, 151936)},
    heavy=["batch_long"],
)  # fmt: skip

# E experts of inner size I, A of them for each token.
_ROUTE = _classes(
    "T E A",
    {"decode_one": (1, 8, 2), "decode_batch": (8, 60, 4), "prefill": (96, 128, 8), "odd": (5, 7, 3)},
)
_EXPERTS = _classes(
    "T K I E A",
    {"decode_one": (1, 64, 96, 8, 2), "decode_batch": (8, 128, 64, 16, 4), "prefill": (48, 64, 32, 8, 2),
     "odd": (5, 63, 37, 5, 3), "wide": (64, 512, 256, 16, 4)},
    heavy=["wide"],
)  # fmt: skip
# Packed by two: K = 2J columns in Q groups, and for the second product I = 2L in U groups.
_PACKED = _classes(
    "T J N Q",
    {"decode_one": (1, 288, 960, 9), "decode_batch": (8, 288, 1536, 9), "prefill": (96, 288, 576, 9),
     "odd": (5, 33, 37, 3), "deep": (4, 2048, 256, 32), "prefill_long": (512, 1024, 2048, 16)},
    heavy=["prefill_long"],
)  # fmt: skip
_PACKED_EXPERTS = _classes(
    "T J L E A Q U",
    {"decode_one": (1, 32, 48, 8, 2, 2, 3), "decode_batch": (8, 64, 32, 16, 4, 4, 2),
     "prefill": (48, 32, 16, 8, 2, 2, 1), "odd": (5, 33, 21, 5, 3, 3, 7)},
)  # fmt: skip
_QKV = _classes(
    "T K H G D C",
    {"mha_d64": (1, 256, 4, 4, 64, 128), "gqa3_d64": (40, 576, 9, 3, 64, 256), "odd": (5, 63, 3, 1, 40, 33)},
)

_LINEAR_TOLERANCE = Tolerance(
    roundings=2, rounded="the larger of |y| and |x W^T|", terms="K", summed="|x| |W|^T + |bias|"
)
_NORM_TOLERANCE = Tolerance(roundings=2, rounded="|y|", terms="K", summed="|y|")
_ADD_NORM_TOLERANCE = Tolerance(roundings=3, rounded="|y|, and its sum's rounding", terms="K", summed="|y|")
_SUM_TOLERANCE = Tolerance(roundings=1, rounded="|x + residual|")
_ROTARY_TOLERANCE = Tolerance(roundings=3, rounded="|first cos| + |second sin|, or as the half has it")
_GATE_TOLERANCE = Tolerance(roundings=2, rounded="|y|", terms="1", summed="(1 + |gate|) |y|")
_GELU_TOLERANCE = Tolerance(
    roundings=2, rounded="|y|", terms="4", summed="|gate| |up|: below 0, 1 + tanh is a difference of equals"
)
_ATTENTION = "sum of p |v| * (1 + 2 * the largest |q| |k| * scale): an error of a score moves its weight"
_PREFILL_TOLERANCE = Tolerance(
    roundings=3, rounded="sum of p |v|: weights, sum and result", terms="D+X+T", summed=_ATTENTION
)
_DECODE_TOLERANCE = Tolerance(
    roundings=3, rounded="sum of p |v|: weights, sum and result", terms="D+M*S", summed=_ATTENTION
)
_ROUTE_TOLERANCE = Tolerance(
    roundings=0,
    terms="E",
    summed="the weight * (1 + the row's largest |logit|): an error of a logit moves its weight",
)
_QKV_TOLERANCE = Tolerance(
    roundings=5, rounded="as rotary, over the product", terms="K", summed="as linear, turned as rotary does"
)
_W8A8_TOLERANCE = Tolerance(
    roundings=2,
    rounded="the larger of |y| and its product",
    terms="4",
    summed="|x W^T| + |bias|: sums are exact, steps and scales are not",
)
_ROOT = "1.5 times the root of the summed squares of independent roundings"
_W4A16_TOLERANCE = Tolerance(
    roundings=2,
    rounded=f"the larger of |y| and its product, and {_ROOT}: of x w, as weights may be in the dtype",
    terms="2*J",
    summed="|x| |W|^T + |bias|",
)
_EXPERTS_TOLERANCE = Tolerance(
    roundings=2,
    rounded=f"the mean of |y| and of the sum of weight |output|, and {_ROOT}: of the first product and its "
    "gate (and of weights, where they are packed), through down",
    terms="K+I",
    summed="sum over experts of weight |down| (|gate_up| |x|), gates as silu_mul has them",
)
_PACKED_EXPERTS_TOLERANCE = Tolerance(
    roundings=2, rounded=_EXPERTS_TOLERANCE.rounded, terms="2*J+2*L", summed=_EXPERTS_TOLERANCE.summed
)
_CACHE = TensorSpec("kv_cache", ("2", "P", "S", "G", "D"), KV)

_CHOICE = (TensorSpec("weights", ("T", "A"), "float32"), TensorSpec("expert_ids", ("T", "A"), "int64"))


def _expert_parts(
    linear: str,
    first: Mapping[str, str],
    second: Mapping[str, str],
    joined: str,
    hidden: str,
    inner: str,
    parameters: Sequence[str],
) -> tuple[PartSpec, ...]:
    """gate_up, silu_mul and down of an expert. parameters: of the product; a fused operator calls its first
    one by the role alone.
    """

    def named(role: str) -> Mapping[str, str]:
        return {role if each == "weight" else f"{role}_{each}": each for each in parameters}

    return (
        PartSpec("gate_up", linear, {**first, "N": joined}, named("gate_up"), stacked=True),
        PartSpec("silu_mul", "silu_mul", {"I": inner}),
        PartSpec("down", linear, {**second, "N": hidden}, named("down"), stacked=True),
    )


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
            weights=("weight",),
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
            parts=(PartSpec("norm", "rms_norm", {"K": "K"}),),
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
            structural=("D", "S"),
        ),
        OpSpec(
            name="attention_prefill",
            summary="causal attention of one sequence's run of tokens",
            inputs=(TensorSpec("query", ("T", "H", "D")), _CACHE, TensorSpec("page_ids", ("M",), "int64")),
            attributes=(AttributeSpec("start", "int"), AttributeSpec("scale", "float")),
            outputs=(TensorSpec("attended", ("T", "H", "D"), tolerance=_PREFILL_TOLERANCE),),
            shape_classes=_PREFILL,
            constraints=("H % G == 0",),
            structural=("D", "S"),
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
            structural=("D", "S"),
        ),
        OpSpec(
            name="gelu_mul",
            summary="gelu(gate) * up, gelu by its approximation with tanh",
            inputs=(TensorSpec("gate_up", ("T", "2*I")),),
            outputs=(TensorSpec("y", ("T", "I"), tolerance=_GELU_TOLERANCE),),
            shape_classes=_GATE,
            fused_from=("gelu", "mul"),
        ),
        OpSpec(
            name="attention_prefill_bounded",
            summary="attention_prefill within a sliding window, scores under a soft cap",
            inputs=(TensorSpec("query", ("T", "H", "D")), _CACHE, TensorSpec("page_ids", ("M",), "int64")),
            attributes=(
                AttributeSpec("start", "int"),
                AttributeSpec("scale", "float"),
                AttributeSpec("window", "int"),
                AttributeSpec("soft_cap", "float"),
            ),
            outputs=(TensorSpec("attended", ("T", "H", "D"), tolerance=_PREFILL_TOLERANCE),),
            shape_classes=_PREFILL,
            constraints=("H % G == 0",),
            structural=("D", "S"),
        ),
        OpSpec(
            name="attention_decode_bounded",
            summary="attention_decode within a sliding window, scores under a soft cap",
            inputs=(
                TensorSpec("query", ("B", "H", "D")),
                _CACHE,
                TensorSpec("page_table", ("B", "M"), "int64"),
                TensorSpec("lengths", ("B",), "int64"),
            ),
            attributes=(
                AttributeSpec("scale", "float"),
                AttributeSpec("window", "int"),
                AttributeSpec("soft_cap", "float"),
            ),
            outputs=(TensorSpec("attended", ("B", "H", "D"), tolerance=_DECODE_TOLERANCE),),
            shape_classes=_DECODE,
            constraints=("H % G == 0",),
            structural=("D", "S"),
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
        OpSpec(
            name="qkv_rotary",
            summary="query, key and value of one product, rotary positions applied",
            inputs=(
                TensorSpec("x", ("T", "K")),
                TensorSpec("weight", ("H*D+2*G*D", "K")),
                TensorSpec("bias", ("H*D+2*G*D",), optional=True),
                TensorSpec("positions", ("T",), "int64"),
                TensorSpec("cos_sin", ("C", "D"), "float32"),
            ),
            attributes=(AttributeSpec("heads", "int"), AttributeSpec("kv_heads", "int")),
            outputs=(
                TensorSpec("query", ("T", "H", "D"), tolerance=_QKV_TOLERANCE),
                TensorSpec("key", ("T", "G", "D"), tolerance=_QKV_TOLERANCE),
                TensorSpec("value", ("T", "G", "D"), tolerance=_LINEAR_TOLERANCE),
            ),
            shape_classes=_QKV,
            fused_from=("linear", "rotary"),
            parts=(
                PartSpec("qkv", "linear", {"N": "H*D+2*G*D", "K": "K"}, {"weight": "weight"}),
                PartSpec("rotary", "rotary", {"H": "H", "G": "G", "D": "D", "C": "C"}),
            ),
            constraints=("D % 2 == 0",),
            weights=("weight",),
        ),
        OpSpec(
            name="moe_route",
            summary="the experts of each token and their weights",
            inputs=(TensorSpec("router_logits", ("T", "E")),),
            attributes=(AttributeSpec("top_k", "int"), AttributeSpec("renormalize", "int")),
            outputs=(
                TensorSpec("weights", ("T", "A"), "float32", tolerance=_ROUTE_TOLERANCE),
                TensorSpec("expert_ids", ("T", "A"), "int64"),
            ),
            shape_classes=_ROUTE,
            fused_from=("softmax", "top_k"),
            constraints=("A <= E",),
        ),
        OpSpec(
            name="moe_experts",
            summary="weighted sum of each token's gated feed-forward experts",
            inputs=(
                TensorSpec("x", ("T", "K")),
                TensorSpec("gate_up", ("E", "2*I", "K")),
                TensorSpec("down", ("E", "K", "I")),
                *_CHOICE,
            ),
            outputs=(TensorSpec("y", ("T", "K"), tolerance=_EXPERTS_TOLERANCE),),
            shape_classes=_EXPERTS,
            fused_from=("linear", "silu_mul"),
            parts=_expert_parts("linear", {"K": "K"}, {"K": "I"}, "2*I", "K", "I", ("weight",)),
            constraints=("A <= E",),
            weights=("gate_up", "down"),
            padded=("E",),
            structural=("E",),
        ),
        OpSpec(
            name="linear_w8a8",
            summary="x, quantised by row, times int8 weights",
            inputs=(
                TensorSpec("x", ("T", "K")),
                TensorSpec("weight", ("N", "K"), "int8"),
                TensorSpec("scale", ("N",), "float32"),
                TensorSpec("bias", ("N",), optional=True),
            ),
            outputs=(TensorSpec("y", ("T", "N"), tolerance=_W8A8_TOLERANCE),),
            shape_classes=_LINEAR,
            weights=("weight", "scale"),
        ),
        OpSpec(
            name="linear_w4a16",
            summary="x times 4-bit weights with scales and zero points by group",
            inputs=(
                TensorSpec("x", ("T", "2*J")),
                TensorSpec("weight", ("N", "J"), "uint8"),
                TensorSpec("scale", ("N", "Q"), "float32"),
                TensorSpec("zero", ("N", "Q"), "uint8"),
                TensorSpec("bias", ("N",), optional=True),
            ),
            outputs=(TensorSpec("y", ("T", "N"), tolerance=_W4A16_TOLERANCE),),
            shape_classes=_PACKED,
            constraints=("2 * J % Q == 0",),
            weights=("weight", "scale", "zero"),
        ),
        OpSpec(
            name="moe_experts_w8a8",
            summary="moe_experts over int8 weights",
            inputs=(
                TensorSpec("x", ("T", "K")),
                TensorSpec("gate_up", ("E", "2*I", "K"), "int8"),
                TensorSpec("gate_up_scale", ("E", "2*I"), "float32"),
                TensorSpec("down", ("E", "K", "I"), "int8"),
                TensorSpec("down_scale", ("E", "K"), "float32"),
                *_CHOICE,
            ),
            outputs=(TensorSpec("y", ("T", "K"), tolerance=_EXPERTS_TOLERANCE),),
            shape_classes=_EXPERTS,
            fused_from=("linear_w8a8", "silu_mul"),
            parts=_expert_parts("linear_w8a8", {"K": "K"}, {"K": "I"}, "2*I", "K", "I", ("weight", "scale")),
            constraints=("A <= E",),
            weights=("gate_up", "gate_up_scale", "down", "down_scale"),
            padded=("E",),
            structural=("E",),
        ),
        OpSpec(
            name="moe_experts_w4a16",
            summary="moe_experts over 4-bit weights",
            inputs=(
                TensorSpec("x", ("T", "2*J")),
                TensorSpec("gate_up", ("E", "4*L", "J"), "uint8"),
                TensorSpec("gate_up_scale", ("E", "4*L", "Q"), "float32"),
                TensorSpec("gate_up_zero", ("E", "4*L", "Q"), "uint8"),
                TensorSpec("down", ("E", "2*J", "L"), "uint8"),
                TensorSpec("down_scale", ("E", "2*J", "U"), "float32"),
                TensorSpec("down_zero", ("E", "2*J", "U"), "uint8"),
                *_CHOICE,
            ),
            outputs=(TensorSpec("y", ("T", "2*J"), tolerance=_PACKED_EXPERTS_TOLERANCE),),
            shape_classes=_PACKED_EXPERTS,
            fused_from=("linear_w4a16", "silu_mul"),
            parts=_expert_parts(
                "linear_w4a16",
                {"J": "J", "Q": "Q"},
                {"J": "L", "Q": "U"},
                "4*L",
                "2*J",
                "2*L",
                ("weight", "scale", "zero"),
            ),
            constraints=("A <= E", "2 * J % Q == 0", "2 * L % U == 0"),
            weights=("gate_up", "gate_up_scale", "gate_up_zero", "down", "down_scale", "down_zero"),
            padded=("E",),
            structural=("E",),
        ),
    )
}
