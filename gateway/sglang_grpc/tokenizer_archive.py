"""A model's tokenizer as a zip archive, from which a router makes its own."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chipmesh.sglang_grpc import smg_common_pb2 as common

CHUNK_BYTES = 64 * 1024
FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
    "config.json", "generation_config.json",
)  # fmt: skip
"""Those that exist are sent. Of a GGUF they are what was made from its header."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class TokenizerArchive:
    """data: a zip archive, the same bytes whenever it is made of the same files. sha256: its, hexadecimal."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[common.GetTokenizerChunk]:
        """Its pieces; the last one has the hash."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            piece = self.data[start : start + CHUNK_BYTES]
            is_last = start + len(piece) == len(self.data)
            yield common.GetTokenizerChunk(data=piece, sha256=self.sha256 if is_last else "")


def read_archive(folder: Path) -> TokenizerArchive:
    """The archive of the tokenizer's files in `folder`; takes a tenth of a second, so call it in a thread.

    Raises:
        OSError: a file that is there cannot be read.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in FILES:
            file = folder / name
            if file.is_file():
                entry = zipfile.ZipInfo(name, date_time=_LONG_AGO)
                archive.writestr(entry, file.read_bytes(), compress_type=zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())
