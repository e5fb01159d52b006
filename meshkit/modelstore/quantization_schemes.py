"""What all formats of quantised checkpoints come down to, and how settings that cannot be had are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from meshkit.modelstore.problems import model_path_error


@dataclass(frozen=True)
class QuantizationScheme:
    """One way to store all quantised matrices of a checkpoint.

    method: as quant_method names it. kind: "w4a16" or "w8a8", the operators that take it. layout: "awq",
    "gptq", "packed" or "integers", how its tensors lie. group: columns that share a scale, 0: all of them.
    takes: whether the rules of the configuration have a matrix (a name without `.weight`) quantised.
    symmetric: no zero points are stored; they are 8. zero_offset: what stored zero points lack. ordered:
    columns are in groups by a stored index (activation order). one_scale: one for a whole w8a8 matrix.
    """

    method: str
    kind: str
    layout: str
    group: int
    takes: Callable[[str], bool]
    symmetric: bool = False
    zero_offset: int = 0
    ordered: bool = False
    one_scale: bool = False

    def columns_of_group(self, columns: int) -> int:
        """Columns that share a scale in a matrix of so many."""
        return self.group or columns


def refuse(field: str, value: object, supported: str, *, source: str) -> NoReturn:
    """Raise InvalidArgument (model_path) that names a field of quantization_config."""
    raise model_path_error(
        f"quantization_config.{field} of {source} is {value!r}; supported: {supported}",
        reason="QUANTIZATION_UNSUPPORTED",
    )


def one_of(
    document: Mapping[str, Any],
    field: str,
    supported: Sequence[object],
    *,
    source: str,
    default: object = None,
    lower: bool = False,
    where: str = "",
) -> Any:
    """The field's value, one of `supported`; where: what the document is within quantization_config."""
    value = document.get(field, default)
    if lower and isinstance(value, str):
        value = value.lower()
    # True == 1, and a size of True is none.
    if not any(value == each and type(value) is type(each) for each in supported):
        words = ", ".join(repr(each) for each in supported)
        refuse(f"{where}{field}", document.get(field, default), words, source=source)
    return value


def whole_number(
    document: Mapping[str, Any], field: str, *, source: str, default: int | None = None, where: str = ""
) -> int:
    """A size above 0; 0 for -1, which formats write for "all columns"."""
    value = document.get(field, default)
    if value == -1:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(f"{where}{field}", value, "-1 or a positive integer", source=source)
    return value
