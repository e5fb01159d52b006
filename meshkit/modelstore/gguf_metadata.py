"""A GGUF's metadata under its architecture's prefix, with the complaints that a damaged file deserves."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from meshkit.modelstore.gguf_header import GgufHeader
from meshkit.modelstore.problems import model_path_error


@dataclass(frozen=True)
class Metadata:
    """Keys are given without the prefix: `attention.head_count` for `llama.attention.head_count`."""

    header: GgufHeader
    prefix: str

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is stored."""
        return self.header.metadata.get(f"{self.prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises InvalidArgument (model_path) for anything but a positive integer."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise model_path_error(
                f"{self.prefix}.{key} of {self.header.file} has to be a positive integer, not {value!r}",
                reason="CONFIG_DAMAGED",
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal. Raises InvalidArgument (model_path) where there is none."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise model_path_error(
                f"{self.prefix}.{key} of {self.header.file} has to be a number, not {value!r}",
                reason="CONFIG_DAMAGED",
            )
        return shortest_single(float(value))


def shortest_single(value: float) -> float:
    """The shortest decimal that is the same float32, so that 9.999999747e-06 reads 1e-05 again."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == packed:
            return short
    return value
