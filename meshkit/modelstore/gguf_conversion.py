"""Converts a GGUF's header into the files of its description folder. Imported only when one is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshkit.modelstore import gguf_model, gguf_tokenizer
from meshkit.modelstore.gguf_header import read_gguf_header
from meshkit.modelstore.progress import Progress
from meshkit.modelstore.weight_index import index_to_json


def write_description(file: Path, folder: Path, *, weights_file: str, progress: Progress) -> None:
    """Parse `file` and write the description into `folder`; the index goes into `weights_file` there.

    Raises:
        InvalidArgument: (model_path) no GGUF, a damaged or truncated one, or one that we cannot run.
    """
    header = read_gguf_header(file, progress=progress)
    family = gguf_model.require_family(header)
    config = gguf_model.read_config(header, family)
    index = gguf_model.read_weight_index(header, config, family)
    index.check_files()
    progress("tokenizer", 0.0)
    gguf_tokenizer.build_tokenizer(header).save(str(folder / "tokenizer.json"), pretty=False)
    progress("tokenizer", 1.0)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", gguf_tokenizer.read_tokenizer_config(header))
    _write_json(folder / "generation_config.json", {"eos_token_id": gguf_tokenizer.end_token_ids(header)})
    _write_json(folder / weights_file, index_to_json(index))


def _write_json(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
