"""The bytes that each token stands for, so that decoding is joining bytes and never looks back at earlier
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.errors import InvalidArgument

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"  # how SentencePiece vocabularies write a space


@dataclass(frozen=True)
class DecodingRule:
    """How a vocabulary's token strings become text.

    to_bytes: token string -> UTF-8 bytes. strips_leading_space: whether a text's very first space is dropped
    (it is the one that was put in front of the prompt when encoding).
    """

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, worked out when first asked for. Ids without a token (padding rows) stand for
    nothing.
    """

    def __init__(self, token_of: Callable[[int], str | None], rule: DecodingRule) -> None:
        super().__init__()
        self._token_of = token_of
        self._rule = rule

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) if token_id >= 0 else None
        found = b"" if token is None else self._rule.to_bytes(token)
        self[token_id] = found
        return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where Latin-1 prints it, else the next free code from
    256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        # An added token written in plain text: it never went through the alphabet.
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match.group(1), 16)])
    return token.replace(_WORD_START, " ").encode()


def decoding_rule(decoder: Mapping[str, Any] | None) -> DecodingRule:
    """The rule that tokenizer.json's `decoder` describes.

    Raises:
        InvalidArgument: (model_path) a decoder that is neither byte-level nor SentencePiece's byte fallback.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodingRule(_byte_level, strips_leading_space=False)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_word_start(steps[0]):
        if len(kinds) == 3:
            return DecodingRule(_byte_fallback, strips_leading_space=False)
        if _strips_one_space(steps[3:]):
            return DecodingRule(_byte_fallback, strips_leading_space=True)
    described = " + ".join(map(str, kinds)) or "none"
    raise InvalidArgument(
        f"model_path: tokenizer.json has decoder {described}; supported: ByteLevel, or "
        "Replace + ByteFallback + Fuse (+ Strip)",
        field="model_path",
        reason="TOKENIZER_UNSUPPORTED",
    )


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


def _replaces_word_start(step: Mapping[str, Any]) -> bool:
    return bool(step.get("pattern") == {"String": _WORD_START} and step.get("content") == " ")


def _strips_one_space(steps: list[Mapping[str, Any]]) -> bool:
    wanted = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return len(steps) == 1 and dict(steps[0]) == wanted
