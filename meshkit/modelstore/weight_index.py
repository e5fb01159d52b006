"""Where each tensor of a model lies: file, offset, shape and encoding, under its Hugging Face name."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from meshkit.modelstore.problems import model_path_error

BLOCK_LAYOUTS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""Encoding -> (values in a block, bytes of a block). Blocks never cross a row."""

INTEGER_BYTES: dict[str, int] = {"I8": 1, "U8": 1, "I32": 4, "I64": 8}
"""Encodings that are no weights by themselves -> bytes of a value: codes of quantised matrices and what goes
with them.
"""


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor.

    offset, nbytes: its bytes within `file`. shape: row-major, as Hugging Face writes it.
    encoding: a key of BLOCK_LAYOUTS or INTEGER_BYTES. rope_permuted_heads: None where rows lie in Hugging
    Face's rotary order; else the number of heads whose rows were interleaved when the GGUF was made, to be
    undone on reading.
    """

    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    encoding: str
    rope_permuted_heads: int | None = None


@dataclass(frozen=True)
class WeightIndex:
    """All tensors of a model by Hugging Face name."""

    tensors: dict[str, TensorEntry]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors, sorted, each once."""
        return tuple(sorted({entry.file for entry in self.tensors.values()}))

    def version(self) -> str:
        """A stable identity of the weights, 16 hexadecimal digits, from file names, sizes and modification
        times.
        """
        digest = hashlib.sha256()
        for file in self.files:
            stat = file.stat()
            digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        return digest.hexdigest()[:16]

    def check_files(self) -> None:
        """Raise InvalidArgument (model_path) when a file is missing or ends before its last tensor does."""
        needed: dict[Path, int] = {}
        for entry in self.tensors.values():
            needed[entry.file] = max(needed.get(entry.file, 0), entry.offset + entry.nbytes)
        for file, needed_bytes in sorted(needed.items()):
            if not file.is_file():
                raise model_path_error(f"weight file {file} is missing", reason="WEIGHTS_MISSING")
            size_bytes = file.stat().st_size
            if size_bytes < needed_bytes:
                raise model_path_error(
                    f"{file} is truncated: it has {size_bytes} bytes and its tensors need {needed_bytes}; "
                    "fetch it again",
                    reason="WEIGHTS_TRUNCATED",
                )

    def check_tensors(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise InvalidArgument (model_path) unless every tensor of `expected` (name -> shape) is there as it
        should be.
        """
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise model_path_error(
                f"{len(missing)} tensors that config.json asks for are not in the weights, "
                f"first {missing[0]}",
                reason="TENSOR_MISSING",
            )
        for name, shape in expected.items():
            entry = self.tensors[name]
            if entry.shape != shape:
                raise model_path_error(
                    f"tensor {name} in {entry.file} has shape {list(entry.shape)}, config.json asks for "
                    f"{list(shape)}",
                    reason="TENSOR_SHAPE",
                )

    def check_kinds(self, names: Iterable[str], *, integers: Collection[str]) -> None:
        """Raise InvalidArgument (model_path) where one of `names` holds integers and is not of `integers`, or
        the other way round.
        """
        for name in names:
            entry = self.tensors[name]
            if (entry.encoding in INTEGER_BYTES) != (name in integers):
                kind = "integers" if name in integers else "weights"
                raise model_path_error(
                    f"tensor {name} in {entry.file} is stored as {entry.encoding}, where config.json (by its "
                    f"quantization_config or the lack of one) makes it hold {kind}",
                    reason="ENCODING_UNSUPPORTED",
                )


def stored_bytes(name: str, shape: tuple[int, ...], encoding: str, *, file: Path) -> int:
    """How many bytes a tensor takes; InvalidArgument (model_path) for encodings we do not read and for split
    blocks.
    """
    if encoding in INTEGER_BYTES:
        return prod(shape) * INTEGER_BYTES[encoding]
    layout = BLOCK_LAYOUTS.get(encoding)
    if layout is None:
        raise model_path_error(
            f"tensor {name} in {file} is stored as {encoding}; supported are {', '.join(BLOCK_LAYOUTS)}",
            reason="ENCODING_UNSUPPORTED",
        )
    block_values, block_bytes = layout
    if shape and shape[-1] % block_values:
        raise model_path_error(
            f"tensor {name} in {file} has rows of {shape[-1]} values, no multiple of the {block_values} in "
            f"a {encoding} block",
            reason="TENSOR_SHAPE",
        )
    return prod(shape) // block_values * block_bytes


def index_to_json(index: WeightIndex) -> dict[str, Any]:
    """The index as plain JSON values; files are stored as they are named in the entries."""
    files = [str(file) for file in index.files]
    rows = {
        name: [files.index(str(entry.file)), entry.offset, entry.nbytes, list(entry.shape), entry.encoding,
               entry.rope_permuted_heads]
        for name, entry in index.tensors.items()
    }  # fmt: skip
    return {"files": files, "tensors": rows}


def index_from_json(document: Mapping[str, Any]) -> WeightIndex:
    """The inverse of `index_to_json`."""
    files = [Path(file) for file in document["files"]]
    return WeightIndex(
        {name: _entry(files, row) for name, row in document["tensors"].items()},
    )


def _entry(files: list[Path], row: Iterable[Any]) -> TensorEntry:
    file, offset, nbytes, shape, encoding, heads = row
    return TensorEntry(files[file], offset, nbytes, tuple(shape), encoding, heads)
