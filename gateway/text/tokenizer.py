"""The model's tokenizer: text to ids and ids to text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers

from gateway.text.token_bytes import TokenBytes, decoding_rule
from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder


class Tokenizer:
    """Encodes and decodes for one model; safe to use from several threads at once.

    vocab_size: how many ids the model takes (rows of its embedding; a vocabulary may be shorter).
    eos_token_ids: the ids that end a generation. file: its tokenizer.json.
    """

    def __init__(self, folder: ModelFolder) -> None:
        """Load the folder's tokenizer.json (about 0.1 s).

        Raises:
            InvalidArgument: (model_path) tokenizer.json is damaged or of a kind that we do not decode.
        """
        self._inner = _load(folder)
        self.file = folder.tokenizer_file
        self.vocab_size = folder.vocab_size
        self.eos_token_ids = folder.eos_token_ids
        decoder = self._inner.decoder
        rule = decoding_rule(None if decoder is None else json.loads(decoder.__getstate__()))
        added = self._inner.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.strips_leading_space = rule.strips_leading_space
        self.token_bytes = TokenBytes(self._inner.id_to_token, rule)

    def __repr__(self) -> str:
        return f"<Tokenizer vocab_size={self.vocab_size} special={len(self.special_token_ids)}>"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of `text`. Special tokens written in the text count as such.

        add_special_tokens: also put in front (or behind) what the model's tokenizer adds to a bare prompt,
        e.g. a beginning-of-sequence token; a rendered chat template has them already.
        Long texts take about 2 s a million tokens: call it through the pool.

        Raises:
            InvalidArgument: (text) lone surrogates, which no tokenizer can encode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"text: holds the lone surrogate {text[error.start]!r} at character {error.start}, "
                "which no tokenizer can encode",
                field="text",
                reason="TEXT_NOT_UNICODE",
            ) from error
        # The batch call lets go of the interpreter lock while it works, the single one does not: with it a
        # prompt of 200,000 tokens stops every other thread for 0.6 s.
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        table = self.token_bytes
        text = b"".join([table[token_id] for token_id in ids if token_id not in skipped]).decode(
            "utf-8", "replace"
        )
        return text.removeprefix(" ") if self.strips_leading_space else text

    def id_of(self, token: str) -> int | None:
        """The id of the token that is written so; None where the vocabulary has none."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup (end of turn, padding, ...) rather than text."""
        return token_id in self.special_token_ids


def _load(folder: ModelFolder) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(folder.tokenizer_file))
    except Exception as error:
        raise InvalidArgument(
            f"model_path: {folder.tokenizer_file} cannot be read as a tokenizer: {error}",
            field="model_path",
            reason="TOKENIZER_DAMAGED",
        ) from error
