"""Builds tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from meshkit.modelstore.gguf_header import GgufHeader
from meshkit.modelstore.gguf_sentencepiece import build_sentencepiece
from meshkit.modelstore.problems import model_path_error

SUPPORTED_VOCABULARIES: tuple[str, ...] = ("gpt2", "llama")
"""Byte-level BPE, and sentencepiece's BPE with its scores."""


class TokenType(IntEnum):
    """GGUF's token types that need treatment of their own."""

    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True)
class _PreTokenization:
    """How text is cut before BPE, and what goes with it in the models that cut so."""

    split: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    normalize_nfc: bool = False


def _gpt2_split() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2_split()])


def _tiktoken_split(longest_number: str) -> Callable[[], PreTokenizer]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + longest_number
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def split() -> PreTokenizer:
        by_pattern = Split(Regex(pattern), behavior="isolated")
        return Sequence([by_pattern, ByteLevel(add_prefix_space=False, use_regex=False)])

    return split


_PRE_TOKENIZATIONS: dict[str, _PreTokenization] = {
    "default": _PreTokenization(_gpt2_split),
    "gpt-2": _PreTokenization(_gpt2_split),
    "smollm": _PreTokenization(_smollm_split),
    "llama-bpe": _PreTokenization(_tiktoken_split("{1,3}"), ignore_merges=True),
    "qwen2": _PreTokenization(_tiktoken_split(""), normalize_nfc=True),
}


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    """The tokenizer that the GGUF describes.

    Raises:
        InvalidArgument: (model_path) no vocabulary, or a vocabulary or pre-tokenizer of a kind that we do not
        build.
    """
    _check_vocabulary(header)
    tokens: list[str] = _required(header, "tokenizer.ggml.tokens")
    tokenizer = _build_model(header, tokens)
    _add_marked_tokens(tokenizer, header, tokens)
    _add_bos(tokenizer, header, tokens)
    return tokenizer


def _build_model(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    """Without the tokens that are found before all else."""
    if header.metadata["tokenizer.ggml.model"] == "llama":
        return build_sentencepiece(
            tokens,
            scores=_required(header, "tokenizer.ggml.scores"),
            types=_required(header, "tokenizer.ggml.token_type"),
            prefix_space=bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True)),
            file=header.file,
        )
    cutting = _choose(header)
    merges = [tuple(merge.split(" ", 1)) for merge in _required(header, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocabulary, merges=merges, ignore_merges=cutting.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception for a merge of unknown tokens
        raise model_path_error(
            f"the vocabulary of {header.file} is damaged: {error}", reason="TOKENIZER_DAMAGED"
        ) from error
    tokenizer = Tokenizer(model)
    if cutting.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cutting.split()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _check_vocabulary(header: GgufHeader) -> None:
    vocabulary = header.metadata.get("tokenizer.ggml.model")
    if vocabulary not in SUPPORTED_VOCABULARIES:
        raise model_path_error(
            f"{header.file} has a vocabulary of kind {vocabulary!r}; supported: "
            f"{', '.join(SUPPORTED_VOCABULARIES)}",
            reason="TOKENIZER_UNSUPPORTED",
        )


def _choose(header: GgufHeader) -> _PreTokenization:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZATIONS:
        raise model_path_error(
            f"{header.file} has pre-tokenizer {name!r}; supported: {', '.join(_PRE_TOKENIZATIONS)}",
            reason="TOKENIZER_UNSUPPORTED",
        )
    return _PRE_TOKENIZATIONS[name]


def _required(header: GgufHeader, key: str) -> list[Any]:
    value = header.metadata.get(key)
    if not isinstance(value, list) or not value:
        raise model_path_error(f"{header.file} has no {key}", reason="TOKENIZER_DAMAGED")
    return value


def _add_marked_tokens(tokenizer: Tokenizer, header: GgufHeader, tokens: list[str]) -> None:
    types = header.metadata.get("tokenizer.ggml.token_type") or []
    marked = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in marked
            if kind == TokenType.CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in marked
            if kind == TokenType.USER_DEFINED
        ]
    )


def _add_bos(tokenizer: Tokenizer, header: GgufHeader, tokens: list[str]) -> None:
    if adds_bos(header):
        bos_id = header.metadata["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        first = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
        )
        before = tokenizer.post_processor
        tokenizer.post_processor = first if before is None else processors.Sequence([before, first])


def adds_bos(header: GgufHeader) -> bool:
    """Whether a token of beginning is put in front of every text: sentencepiece's models do by default."""
    default = header.metadata.get("tokenizer.ggml.model") == "llama"
    return bool(header.metadata.get("tokenizer.ggml.add_bos_token", default))


def read_tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """tokenizer_config.json: the chat template and the names of the tokens that it uses."""
    tokens: list[str] = _required(header, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"add_bos_token": adds_bos(header)}
    for word, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{word}_token"] = tokens[token_id]
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def end_token_ids(header: GgufHeader) -> list[int]:
    """The ids that end a generation: end of sequence, and end of turn where the GGUF names one."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [header.metadata[key] for key in keys if header.metadata.get(key) is not None]
    return list(dict.fromkeys(found))
