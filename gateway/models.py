"""The served models: opened once at the start, looked up by name for each request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.config import ServedModelConfig
from gateway.text import ChatTemplate, Tokenizer
from meshkit.errors import FailedPrecondition, InvalidArgument, NotFound
from meshkit.modelstore import ModelFolder, open_model

DEFAULT_TOKEN_MODEL_VOCAB = 32_000


@dataclass(frozen=True)
class ModelText:
    """Turns text into tokens. add_special_tokens: for plain text; a chat template writes its own."""

    tokenizer: Tokenizer
    template: ChatTemplate
    add_special_tokens: bool


@dataclass(frozen=True)
class ServedModel:
    """Facts about one model. text, folder: None for a model of token ids alone."""

    name: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    text: ModelText | None
    folder: ModelFolder | None = field(default=None, compare=False)

    def require_text(self, field: str) -> ModelText:
        """The model's tokenizer and template.

        Raises:
            FailedPrecondition: it has none, so `field` cannot be used with it.
        """
        if self.text is None:
            raise FailedPrecondition(
                f"{field}: model {self.name!r} has no tokenizer.json, so it takes and gives token ids only; "
                "send prompt.tokens, without stop strings",
                field=field,
                reason="MODEL_HAS_NO_TOKENIZER",
            )
        return self.text


class ServedModels:
    """All served models, in the order of the configuration."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}

    def __repr__(self) -> str:
        return f"<ServedModels {', '.join(self._by_name)}>"

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """The served names."""
        return list(self._by_name)

    def find(self, name: str) -> ServedModel:
        """The model called `name`; the only one for "".

        Raises:
            NotFound: no such model; the served ones are listed.
            InvalidArgument: no name given while several models are served.
        """
        served = ", ".join(self._by_name)
        if not name:
            if len(self._by_name) == 1:
                return next(iter(self._by_name.values()))
            raise InvalidArgument(
                f"model is empty, and several are served; name one of: {served}", field="model"
            )
        model = self._by_name.get(name)
        if model is None:
            raise NotFound(
                f"model {name[:200]!r} is not served here; served: {served}",
                field="model",
                reason="MODEL_NOT_FOUND",
            )
        return model


def open_models(configs: Sequence[ServedModelConfig], *, cache_dir: Path) -> ServedModels:
    """Open every configured model. Reads files, for seconds in the worst case: call it in a thread.

    Raises:
        InvalidArgument: a reference is unusable, or its context_length exceeds the model's.
    """
    return ServedModels([open_served_model(config, cache_dir=cache_dir) for config in configs])


def open_served_model(config: ServedModelConfig, *, cache_dir: Path) -> ServedModel:
    """Open one model, with its tokenizer and template where it has them. Blocks on files.

    Raises:
        InvalidArgument: as `open_models`.
    """
    if config.path is None:
        return _token_model(config, {})
    token_only = _token_model_facts(Path(config.path).expanduser())
    if token_only is not None:
        return _token_model(config, token_only)
    folder = open_model(config.path, cache_dir=cache_dir, need_weights=False)
    return ServedModel(
        name=config.name,
        context_tokens=_context_tokens(config, folder.context_length),
        vocab_size=folder.vocab_size,
        eos_token_ids=folder.eos_token_ids,
        text=_read_text(folder),
        folder=folder,
    )


def _read_text(folder: ModelFolder) -> ModelText:
    # Without the setting, the tokenizer's own post-processor decides, as everywhere else.
    add_special_tokens = bool(folder.tokenizer_config.get("add_bos_token", True))
    return ModelText(Tokenizer(folder), ChatTemplate(folder), add_special_tokens)


def _token_model_facts(path: Path) -> dict[str, Any] | None:
    """config.json of a folder that has one and neither a tokenizer nor a GGUF; None for every other path."""
    file = path / "config.json"
    if not file.is_file() or (path / "tokenizer.json").exists() or any(path.glob("*.gguf")):
        return None
    try:
        facts = json.loads(file.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"models: {file} is not JSON: {error}", field="models") from error
    if not isinstance(facts, dict):
        raise InvalidArgument(f"models: {file} does not hold a JSON object", field="models")
    return facts


def _token_model(config: ServedModelConfig, facts: dict[str, Any]) -> ServedModel:
    vocab_size = config.vocab_size or facts.get("vocab_size", DEFAULT_TOKEN_MODEL_VOCAB)
    context = facts.get("max_position_embeddings", config.context_length)
    vocab_size = _positive("vocab_size", vocab_size, config)
    context = _positive("max_position_embeddings", context, config)
    eos = facts.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ServedModel(config.name, _context_tokens(config, context), vocab_size, eos_ids, text=None)


def _positive(name: str, value: object, config: ServedModelConfig) -> int:
    if isinstance(value, int) and value > 0:
        return value
    raise InvalidArgument(
        f"models: {name} of model {config.name!r} is {value!r}, it has to be a positive integer; "
        "write it into its config.json",
        field="models",
    )


def _context_tokens(config: ServedModelConfig, available: int) -> int:
    wanted = config.context_length
    if wanted is not None and wanted > available:
        raise InvalidArgument(
            f"models: context_length of model {config.name!r} is {wanted}, the model has {available}; "
            "lower it or leave it out",
            field="models",
        )
    return wanted or available
