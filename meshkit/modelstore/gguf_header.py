"""Reads a GGUF file's metadata and tensor table with the `gguf` library; tensor data is not touched.

Slow to import and to run, so only `description.describe_gguf` imports this module, once per GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, ReaderField

from meshkit.modelstore.problems import model_path_error
from meshkit.modelstore.progress import Progress

_MAGIC = b"GGUF"


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table. shape is row-major; encoding is ggml's name; offset counts from the file's
    start.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """What stands in front of the tensor data."""

    file: Path
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


def is_gguf(file: Path) -> bool:
    """Whether `file` begins with GGUF's magic number."""
    with file.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def read_gguf_header(file: Path, *, progress: Progress) -> GgufHeader:
    """Parse metadata and tensor table of `file` (seconds for a large vocabulary).

    Raises:
        InvalidArgument: (model_path) no GGUF, or one that ends or makes no sense within its header.
    """
    if not is_gguf(file):
        raise model_path_error(
            f"{file} is not a GGUF file (it does not begin with {_MAGIC.decode()!r})", reason="NOT_GGUF"
        )
    try:
        return _parse(file, progress)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise model_path_error(
            f"{file} is truncated or damaged: its {file.stat().st_size} bytes do not hold a whole GGUF "
            f"header ({type(error).__name__}: {error}); fetch it again",
            reason="WEIGHTS_TRUNCATED",
        ) from error


class _HeaderReader(GGUFReader):
    """Keeps the tensor table and leaves the data alone, so that a file with too little data can be named as
    such.
    """

    table: list[GgufTensor]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.table = [_tensor(start_offs, field) for field in fields]


def _parse(file: Path, progress: Progress) -> GgufHeader:
    progress("reading", 0.0)
    reader = _HeaderReader(file)
    metadata: dict[str, Any] = {}
    for done, field in enumerate(reader.fields.values(), start=1):
        metadata[field.name] = field.contents()
        progress("reading", done / len(reader.fields))
    return GgufHeader(file, metadata, reader.table)


def _tensor(data_start: int, field: Any) -> GgufTensor:
    dims, raw_type, offset = field.parts[3], field.parts[4], field.parts[5]
    return GgufTensor(
        name=field.name,
        shape=tuple(int(size) for size in reversed(dims.tolist())),
        encoding=GGMLQuantizationType(int(raw_type[0])).name,
        offset=int(data_start) + int(offset[0]),
    )
