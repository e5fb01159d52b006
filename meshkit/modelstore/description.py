"""The cached description of a GGUF: a small Hugging Face folder whose weights stay in the GGUF itself."""

from __future__ import annotations

import hashlib
from pathlib import Path

from meshkit.modelstore.progress import Progress
from meshkit.modelstore.publish import publish_folder

# Part of the cache key: raise it when what is written below changes.
_FORMAT = 2

WEIGHTS_FILE = "weights.json"


def describe_gguf(file: Path, *, cache_dir: Path, progress: Progress) -> Path:
    """The folder with config.json, tokenizer.json, tokenizer_config.json, generation_config.json and
    weights.json.

    The first call for a file parses it (seconds); later ones only look for the folder. A file that changed in
    size or modification time counts as another. Safe when several processes do it at once.

    Raises:
        InvalidArgument: (model_path) no GGUF, a damaged or truncated one, or one that we cannot run.
    """
    stat = file.stat()
    identity = f"{_FORMAT}\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_dir / "descriptions" / f"{file.stem}-{key}"
    if target.is_dir():
        return target
    return publish_folder(target, build=lambda folder: _write_description(file, folder, progress))


def _write_description(file: Path, folder: Path, progress: Progress) -> None:
    # A second open must not pay for the import of the machinery for GGUF.
    from meshkit.modelstore.gguf_conversion import write_description  # noqa: PLC0415

    write_description(file, folder, weights_file=WEIGHTS_FILE, progress=progress)
