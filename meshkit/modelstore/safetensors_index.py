"""Reads the headers of safetensors files: eight bytes of length, then JSON. Tensor data is not touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshkit.modelstore.problems import model_path_error
from meshkit.modelstore.weight_index import TensorEntry, WeightIndex, stored_bytes

_LENGTH_BYTES = 8
# The format's own limit; it keeps a damaged length from becoming a huge read.
_MAX_HEADER_BYTES = 100_000_000


def read_safetensors_index(folder: Path) -> WeightIndex | None:
    """The index of all *.safetensors in `folder`, or None where there is none.

    With model.safetensors.index.json exactly the files it names are read; without it, all that lie there.

    Raises:
        InvalidArgument: (model_path) a file is missing, truncated, damaged, or stored in an unknown encoding.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in _weight_files(folder):
        for name, entry in _read_header(file).items():
            if name in tensors:
                raise model_path_error(
                    f"tensor {name} is in {tensors[name].file.name} and again in {file.name} of {folder}",
                    reason="TENSOR_REPEATED",
                )
            tensors[name] = entry
    return WeightIndex(tensors) if tensors else None


def _weight_files(folder: Path) -> list[Path]:
    index_file = folder / "model.safetensors.index.json"
    if not index_file.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index_file.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise model_path_error(f"{index_file} is damaged: {error!r}", reason="WEIGHTS_DAMAGED") from error
    for name in names:
        if not (folder / name).is_file():
            raise model_path_error(
                f"{index_file.name} names {name}, which is missing in {folder}", reason="WEIGHTS_MISSING"
            )
    return [folder / name for name in names]


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise model_path_error(
                f"{file} is no safetensors file (header length {header_bytes})", reason="WEIGHTS_DAMAGED"
            )
        data_start = _LENGTH_BYTES + header_bytes
        if size_bytes < max(data_start, _LENGTH_BYTES + 2):
            raise model_path_error(
                f"{file} is truncated: it has {size_bytes} bytes and its header alone needs "
                f"{max(data_start, _LENGTH_BYTES + 2)}; fetch it again",
                reason="WEIGHTS_TRUNCATED",
            )
        header = stream.read(header_bytes)
    try:
        document = json.loads(header)
        document.pop("__metadata__", None)
        return {name: _entry(file, name, info, data_start=data_start) for name, info in document.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise model_path_error(f"the header of {file} is damaged: {error!r}",
                               reason="WEIGHTS_DAMAGED") from error  # fmt: skip


def _entry(file: Path, name: str, info: Mapping[str, Any], *, data_start: int) -> TensorEntry:
    begin, end = info["data_offsets"]
    shape = tuple(int(size) for size in info["shape"])
    nbytes = stored_bytes(name, shape, info["dtype"], file=file)
    if end - begin != nbytes or begin < 0:
        raise model_path_error(
            f"tensor {name} in {file} spans {end - begin} bytes, its shape and type need {nbytes}",
            reason="WEIGHTS_DAMAGED",
        )
    return TensorEntry(
        file=file, offset=data_start + begin, nbytes=nbytes, shape=shape, encoding=info["dtype"]
    )
