"""The tokenizer as an archive: whole, in pieces that a router takes, and the same bytes each time."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

from gateway.sglang_grpc.tokenizer_archive import CHUNK_BYTES, read_archive


def test_the_pieces_make_the_archive_and_the_last_one_has_its_hash(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(os.urandom(3 * CHUNK_BYTES))
    (tmp_path / "weights.json").write_text("{}")
    chunks = list(read_archive(tmp_path).chunks())
    data = b"".join(chunk.data for chunk in chunks)
    assert len(chunks) == 4
    assert max(len(chunk.data) for chunk in chunks) == CHUNK_BYTES
    assert [chunk.sha256 for chunk in chunks] == ["", "", "", hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == ["tokenizer.json"]
        assert archive.read("tokenizer.json") == (tmp_path / "tokenizer.json").read_bytes()


def test_equal_files_make_equal_archives_whenever_they_were_written(tmp_path: Path) -> None:
    archives = []
    for time in (1_000_000_000, 1_700_000_000):
        file = tmp_path / "config.json"
        file.write_text("{}")
        os.utime(file, (time, time))
        archives.append(read_archive(tmp_path))
    assert archives[0] == archives[1]
