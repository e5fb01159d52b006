"""Checkpoints that are quantised already: what `quantization_config` says, which tensors lie in the files.

AWQ, GPTQ and compressed-tensors, as far as the catalogue's operators over quantised weights express them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.errors import InvalidArgument
from meshkit.modelstore.compressed_tensors import read_compressed_tensors
from meshkit.modelstore.problems import model_path_error
from meshkit.modelstore.quantization_schemes import (
    QuantizationScheme,
    one_of,
    refuse,
    whole_number,
)

Shape = tuple[int, ...]
MATRICES_FIELD = "quantized_matrices"
"""In a completed configuration: the matrices that files hold quantised, once files have been looked at."""
_BLOCK_MATRICES = re.compile(
    r"model\.layers\.\d+\..*(_proj|\.experts\.\d+\.w[123])$",
)
"""What AWQ and GPTQ quantise: products of attention and feed-forward parts, never routers, heads, tables."""
_NIBBLES = 8
"""Codes of 4 bits in an int32."""


@dataclass(frozen=True)
class CheckpointQuantization:
    """How a checkpoint's matrices are stored.

    matrices: names (without `.weight`) as the files have them; None: as the configuration's rules say.
    """

    scheme: QuantizationScheme
    matrices: frozenset[str] | None = None

    @property
    def label(self) -> str:
        """The format as numeric classes and weight versions name it, such as "awq-w4a16"."""
        return f"{self.scheme.method}-{self.scheme.kind}"

    def holds(self, matrix: str, shape: Shape) -> bool:
        """Whether `matrix` (a name without `.weight`), of `shape`, is stored quantised."""
        if len(shape) != 2 or matrix == "model.embed_tokens":
            return False
        if self.matrices is not None:
            return matrix in self.matrices
        return self.scheme.takes(matrix)

    def stored(self, matrix: str, shape: Shape) -> dict[str, Shape]:
        """Full names and shapes of the tensors that hold a matrix [out, in].

        Raises:
            InvalidArgument: (model_path) a size that the format's groups or words do not divide.
        """
        out, inner = shape
        check_divides(self.scheme, matrix, shape)
        groups = inner // self.scheme.columns_of_group(inner)
        return {
            f"{matrix}.{suffix}": each
            for suffix, each in _LAYOUTS[self.scheme.layout](self.scheme, out, inner, groups).items()
        }


def read_quantization(
    config: Mapping[str, Any], *, source: str = "config.json"
) -> CheckpointQuantization | None:
    """What a configuration (completed or not) says; None: its weights are plain.

    Raises:
        InvalidArgument: (model_path) a format, or a setting of one, that no operator expresses; the field,
            its value and what is supported are named.
    """
    document = config.get("quantization_config")
    if not document:
        return None
    method = document.get("quant_method", "unknown") if isinstance(document, Mapping) else document
    reader = _READERS.get(method) if isinstance(document, Mapping) else None
    if reader is None:
        raise model_path_error(
            f"quantization_config {method!r} of {source} is not supported; supported: "
            f"{', '.join(_READERS)}, unquantised safetensors, or a GGUF",
            reason="QUANTIZATION_UNSUPPORTED",
        )
    if document.get("kv_cache_scheme") and not document.get("config_groups", True):
        return None  # scales of a cache beside plain weights
    held = config.get(MATRICES_FIELD)
    scheme = reader(document, source)
    return CheckpointQuantization(scheme, None if held is None else frozenset(held))


def find_matrices(
    quantization: CheckpointQuantization, stored: Iterable[str], shapes: Mapping[str, Shape]
) -> list[str]:
    """The matrices of `shapes` that are stored quantised, as names of stored tensors tell. What files hold
    goes before what the configuration's patterns say.
    """
    suffix = _CODES[quantization.scheme.layout]
    present = frozenset(stored)
    names = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    if suffix == "weight":
        return [name for name in names if f"{name}.weight_scale" in present]
    return [name for name in names if f"{name}.{suffix}" in present]


def stored_shapes(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """shapes (of a model's tensors by name) with the tensors that hold quantised matrices in their place."""
    quantization = read_quantization(config)
    if quantization is None:
        return dict(shapes)
    stored: dict[str, Shape] = {}
    for name, shape in shapes.items():
        matrix = name.removesuffix(".weight")
        if matrix != name and quantization.holds(matrix, shape):
            stored |= quantization.stored(matrix, shape)
        else:
            stored[name] = shape
    return stored


def integer_tensors(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Names of stored tensors that hold integers: codes, zero points, orders of columns."""
    quantization = read_quantization(config)
    if quantization is None:
        return frozenset()
    matrices = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    held = [each for each in matrices if quantization.holds(each, shapes[f"{each}.weight"])]
    suffixes = _INTEGERS if quantization.scheme.kind == "w4a16" else ("weight",)
    return frozenset(f"{each}.{suffix}" for each in held for suffix in suffixes)


def check_divides(scheme: QuantizationScheme, matrix: str, shape: Shape) -> None:
    """Raise InvalidArgument (model_path) where groups or packed words do not fill a matrix [out, in]."""
    out, inner = shape
    group = scheme.columns_of_group(inner)
    wanted = {f"group_size {group}": inner % group}
    if scheme.kind == "w4a16":
        wanted["2, columns of a byte"] = inner % 2
    if scheme.layout in ("awq", "gptq"):
        wanted["8, outputs of a word"] = out % _NIBBLES
    if scheme.layout == "gptq":
        wanted["8, columns of a word"] = inner % _NIBBLES
    for divisor, rest in wanted.items():
        if rest:
            raise model_path_error(
                f"matrix {matrix} of {out} outputs and {inner} columns does not divide by {divisor}, "
                f"as {scheme.method} stores it",
                reason="QUANTIZATION_UNSUPPORTED",
            )


def check_asked(asked: str, quantization: CheckpointQuantization | None) -> None:
    """Raise InvalidArgument (quantization) where another one is asked for than a checkpoint has."""
    if quantization is None or asked in ("", quantization.scheme.kind, quantization.scheme.method):
        return
    raise InvalidArgument(
        f"quantization is {asked!r}, and the checkpoint is quantised already, as {quantization.label}; leave "
        f"quantization out, or name {quantization.scheme.kind} or {quantization.scheme.method}",
        field="quantization",
        reason="ALREADY_QUANTIZED",
    )


def _awq(scheme: QuantizationScheme, out: int, inner: int, groups: int) -> dict[str, Shape]:
    del scheme
    words = out // _NIBBLES
    return {"qweight": (inner, words), "qzeros": (groups, words), "scales": (groups, out)}


def _gptq(scheme: QuantizationScheme, out: int, inner: int, groups: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "qweight": (inner // _NIBBLES, out),
        "qzeros": (groups, out // _NIBBLES),
        "scales": (groups, out),
    }
    return shapes | ({"g_idx": (inner,)} if scheme.ordered else {})


def _packed(scheme: QuantizationScheme, out: int, inner: int, groups: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "weight_packed": (out, -(-inner // _NIBBLES)),
        "weight_scale": (out, groups),
    }
    if not scheme.symmetric:
        shapes["weight_zero_point"] = (-(-out // _NIBBLES), groups)
    return shapes | ({"weight_g_idx": (inner,)} if scheme.ordered else {})


def _whole_bytes(scheme: QuantizationScheme, out: int, inner: int, groups: int) -> dict[str, Shape]:
    del groups
    return {"weight": (out, inner), "weight_scale": (1,) if scheme.one_scale else (out, 1)}


_LAYOUTS = {"awq": _awq, "gptq": _gptq, "packed": _packed, "integers": _whole_bytes}
_INTEGERS = ("qweight", "qzeros", "g_idx", "weight_packed", "weight_zero_point", "weight_g_idx")
_CODES = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "integers": "weight"}


def _read_awq(document: Mapping[str, Any], source: str) -> QuantizationScheme:
    one_of(document, "version", ("gemm",), source=source, default="gemm", lower=True)
    one_of(document, "zero_point", (True,), source=source, default=True)
    skipped = tuple(document.get("modules_to_not_convert") or ())
    return QuantizationScheme(
        method="awq",
        kind="w4a16",
        layout="awq",
        group=_four_bit_groups(document, source),
        # AutoAWQ leaves out every layer whose name has such a text in it.
        takes=lambda matrix: bool(_BLOCK_MATRICES.match(matrix)) and not any(t in matrix for t in skipped),
    )


def _read_gptq(document: Mapping[str, Any], source: str) -> QuantizationScheme:
    form = one_of(document, "checkpoint_format", ("gptq", "gptq_v2"), source=source, default="gptq")
    one_of(document, "is_marlin_format", (False, None), source=source, default=False)
    group = _four_bit_groups(document, source)
    return QuantizationScheme(
        method="gptq",
        kind="w4a16",
        layout="gptq",
        group=group,
        zero_offset=0 if form == "gptq_v2" else 1,
        # With one group for all columns their order means nothing.
        ordered=bool(document.get("desc_act")) and group > 0,
        takes=_gptq_rule(document, source),
    )


def _gptq_rule(document: Mapping[str, Any], source: str) -> Callable[[str], bool]:
    """By block matrices, `modules_in_block_to_quantize`, and patterns of `dynamic` that leave layers out."""
    listed = document.get("modules_in_block_to_quantize")
    suffixes = (
        [name for each in listed for name in ([each] if isinstance(each, str) else each)] if listed else None
    )
    dynamic = document.get("dynamic") or {}
    for pattern, changes in dynamic.items():
        if not pattern.startswith("-:") and changes:
            refuse("dynamic", pattern, "patterns that leave layers out (-:)", source=source)
    skipped = [re.compile(pattern[2:]) for pattern in dynamic if pattern.startswith("-:")]

    def takes(matrix: str) -> bool:
        if not _BLOCK_MATRICES.match(matrix) or any(each.match(matrix) for each in skipped):
            return False
        return suffixes is None or any(matrix.endswith(f".{suffix}") for suffix in suffixes)

    return takes


def _four_bit_groups(document: Mapping[str, Any], source: str) -> int:
    """Columns of a group, 0: all. Raises InvalidArgument for other widths than 4 bits."""
    for field in ("bits", "w_bit"):
        if field in document:
            one_of(document, field, (4,), source=source)
    if "bits" not in document and "w_bit" not in document:
        refuse("bits", None, "4", source=source)
    field = "group_size" if "group_size" in document else "q_group_size"
    return whole_number(document, field, source=source, default=128)


_READERS = {"awq": _read_awq, "gptq": _read_gptq, "compressed-tensors": read_compressed_tensors}
