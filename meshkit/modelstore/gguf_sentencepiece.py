"""A tokenizer from sentencepiece's pieces and scores, as GGUFs of Llama 2, Mistral and Gemma have them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from meshkit.modelstore.problems import model_path_error

_SPACE = "\u2581"


class _PieceType(IntEnum):
    """GGUF's types of tokens that sentencepiece treats in ways of their own."""

    UNKNOWN = 2
    CONTROL = 3


def build_sentencepiece(
    tokens: Sequence[str],
    *,
    scores: Sequence[float],
    types: Sequence[int],
    prefix_space: bool,
    file: Path,
) -> Tokenizer:
    """Sentencepiece's BPE: of all neighbours that make a piece, those of the highest score are joined first.

    prefix_space: a space is put in front of a text, and taken off again where one is decoded. What no piece
    covers becomes bytes.

    Raises:
        InvalidArgument: (model_path) lists of different lengths, or a vocabulary without bytes.
    """
    if not len(tokens) == len(scores) == len(types):
        raise model_path_error(
            f"the vocabulary of {file} is damaged: {len(tokens)} tokens, {len(scores)} scores, "
            f"{len(types)} types",
            reason="TOKENIZER_DAMAGED",
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "<0x00>" not in vocabulary:
        raise model_path_error(
            f"the vocabulary of {file} has no tokens of bytes; supported are those that fall back on bytes",
            reason="TOKENIZER_UNSUPPORTED",
        )
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == _PieceType.UNKNOWN]
    model = BPE(
        vocab=vocabulary,
        merges=_merges(tokens, scores, types),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaced = normalizers.Replace(" ", _SPACE)
    front = [normalizers.Prepend(_SPACE)] if prefix_space else []
    tokenizer.normalizer = normalizers.Sequence([*front, spaced])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix_space else parts)
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, the best pieces first; of one piece in order of the left
    part's place in the vocabulary.
    """
    special = (_PieceType.UNKNOWN, _PieceType.CONTROL)
    places = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in special
    }
    found: list[tuple[float, int, int, str, str]] = []
    for piece, place in places.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in places and right in places:
                found.append((-scores[place], places[left], places[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
