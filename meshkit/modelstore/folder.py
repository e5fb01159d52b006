"""Opens a model reference (a folder, a GGUF, or the name of a pulled model) as one description for all
readers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.modelstore.checkpoint_quantization import (
    MATRICES_FIELD,
    find_matrices,
    integer_tensors,
    read_quantization,
    stored_shapes,
)
from meshkit.modelstore.description import WEIGHTS_FILE, describe_gguf
from meshkit.modelstore.hub import is_hub_id
from meshkit.modelstore.layouts import complete_config, tensor_shapes
from meshkit.modelstore.locations import pulled_model_dir
from meshkit.modelstore.problems import model_path_error
from meshkit.modelstore.progress import Progress, ignore_progress
from meshkit.modelstore.pull import PULLABLE_MODELS
from meshkit.modelstore.safetensors_index import read_safetensors_index
from meshkit.modelstore.weight_index import WeightIndex, index_from_json


@dataclass(frozen=True)
class ModelFolder:
    """A model that is ready to be read.

    name: what clients call it by default. source: the folder or .gguf that the reference meant.
    config: config.json with Hugging Face's field names, defaults filled in. tokenizer_file: tokenizer.json.
    tokenizer_config: tokenizer_config.json, its `chat_template` a string where there is one, its tokens
    strings.
    weights: None when opened without weights. weights_version: changes when the weights do.
    context_length, vocab_size: in tokens. eos_token_ids: the tokens that end a generation.
    """

    name: str
    source: Path
    config: dict[str, Any]
    tokenizer_file: Path
    tokenizer_config: dict[str, Any]
    weights: WeightIndex | None
    weights_version: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def open_model(
    reference: str,
    *,
    cache_dir: Path,
    progress: Progress | None = None,
    need_weights: bool = True,
    need_tokenizer: bool = True,
) -> ModelFolder:
    """Open a folder in Hugging Face layout, a .gguf, a folder with exactly one .gguf, or a model pulled
    before.

    A path that exists goes before a pulled model of the same name. A model of the hub, `org/name`, is pulled
    first: nothing is fetched here. The first open of a GGUF converts its
    header (seconds) and reports to `progress(stage, share)`; later ones take milliseconds.
    `need_weights=False` is enough of a folder for load-format dummy: weights are then neither looked for nor
    checked. `need_tokenizer=False` is enough where only sizes matter: tokenizer.json may then be missing.

    Raises:
        InvalidArgument: (model_path) whatever makes the reference unusable, with what was found and what is
        supported.
    """
    try:
        source = _resolve(reference, cache_dir=cache_dir)
        gguf = _gguf_of(source)
        folder = (
            source
            if gguf is None
            else describe_gguf(gguf, cache_dir=cache_dir, progress=progress or ignore_progress)
        )
        name = reference if _is_pulled_id(reference) else source.stem if source.is_file() else source.name
        return _read_folder(
            folder, source=source, name=name, need_weights=need_weights, need_tokenizer=need_tokenizer
        )
    except OSError as error:
        raise model_path_error(
            f"{reference!r} cannot be opened: {error}", reason="MODEL_UNREADABLE"
        ) from error


def _resolve(reference: str, *, cache_dir: Path) -> Path:
    if not reference.strip():
        raise model_path_error("is empty; give a folder, a .gguf or the name of a pulled model",
                               reason="MODEL_NOT_FOUND")  # fmt: skip
    path = Path(reference).expanduser()
    if path.exists():
        return path.resolve()
    is_name = Path(reference).name == reference and reference not in (".", "..")
    if is_name or is_hub_id(reference):
        pulled = pulled_model_dir(reference, cache_dir=cache_dir)
        if pulled.is_dir():
            return pulled.resolve()
    can_pull = reference in PULLABLE_MODELS or is_hub_id(reference)
    hint = f"; `chipmesh pull {reference}` fetches it" if can_pull else ""
    raise model_path_error(
        f"{reference!r} is neither an existing path nor a model pulled into {cache_dir}{hint}",
        reason="MODEL_NOT_FOUND",
    )


def _is_pulled_id(reference: str) -> bool:
    return is_hub_id(reference) and not Path(reference).expanduser().exists()


def _gguf_of(source: Path) -> Path | None:
    if source.is_file():
        return source
    if not source.is_dir():
        raise model_path_error(f"{source} is neither a file nor a folder", reason="MODEL_NOT_FOUND")
    found = sorted(source.glob("*.gguf"))
    if (source / "config.json").is_file() and (not found or any(source.glob("*.safetensors"))):
        return None
    if len(found) == 1:
        return found[0]
    if found:
        raise model_path_error(
            f"{source} holds {len(found)} .gguf files; name one of {', '.join(file.name for file in found)}",
            reason="MODEL_AMBIGUOUS",
        )
    raise model_path_error(f"{source} holds neither config.json nor a .gguf", reason="MODEL_NOT_FOUND")


def _read_folder(
    folder: Path, *, source: Path, name: str, need_weights: bool, need_tokenizer: bool
) -> ModelFolder:
    config = complete_config(_read_json(folder / "config.json"), source=str(source))
    tokenizer_file = folder / "tokenizer.json"
    if need_tokenizer and not tokenizer_file.is_file():
        raise model_path_error(f"{source} has no tokenizer.json", reason="TOKENIZER_MISSING")
    weights = _read_weights(folder, config) if need_weights else None
    return ModelFolder(
        name=name,
        source=source,
        config=config,
        tokenizer_file=tokenizer_file,
        tokenizer_config=_read_tokenizer_config(folder),
        weights=weights,
        weights_version=weights.version() if weights else _config_version(config),
        context_length=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        eos_token_ids=_read_eos_token_ids(folder, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        raise model_path_error(f"{file} is not JSON: {error}", reason="CONFIG_DAMAGED") from error
    if not isinstance(document, dict):
        raise model_path_error(f"{file} does not hold a JSON object", reason="CONFIG_DAMAGED")
    return document


def _read_weights(folder: Path, config: dict[str, Any]) -> WeightIndex:
    """The index, checked against the configuration, which learns which matrices are stored quantised."""
    described = folder / WEIGHTS_FILE
    weights = (
        index_from_json(_read_json(described)) if described.is_file() else read_safetensors_index(folder)
    )
    if weights is None:
        raise model_path_error(
            f"{folder} holds no weights (*.safetensors); load-format dummy needs none",
            reason="WEIGHTS_MISSING",
        )
    weights.check_files()
    shapes = tensor_shapes(config)
    if quantization := read_quantization(config):
        config[MATRICES_FIELD] = find_matrices(quantization, weights.tensors, shapes)
    stored = stored_shapes(config, shapes)
    weights.check_tensors(stored)
    weights.check_kinds(stored, integers=integer_tensors(config, shapes))
    return weights


def _config_version(config: Mapping[str, Any]) -> str:
    return "config-" + hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    config = _read_json(file) if file.is_file() else {}
    for key, value in list(config.items()):
        # Tokens may be written as objects with their matching rules; only their text matters here.
        if key.endswith("_token") and isinstance(value, dict):
            config[key] = value.get("content")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        config["chat_template"] = template_file.read_text(encoding="utf-8")
    elif isinstance(named := config.get("chat_template"), list):
        templates = {entry.get("name"): entry.get("template") for entry in named}
        config["chat_template"] = templates.get("default")
    return config


def _read_eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json goes before config.json: it is where chat models list the end of a turn."""
    file = folder / "generation_config.json"
    generation = _read_json(file) if file.is_file() else {}
    value = generation.get("eos_token_id")
    if value is None or value == []:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
