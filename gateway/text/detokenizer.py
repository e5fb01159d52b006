"""Text from tokens as they come, never with half a character in it."""

from __future__ import annotations

from codecs import utf_8_decode as _decode
from collections.abc import Collection, Sequence

from gateway.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text that follows a prompt, piece by piece.

    However the tokens are cut into calls, what `feed` and `flush` return adds up to the same text: that of
    prompt and tokens together, less that of the prompt. A character that begins in the prompt and is
    completed afterwards comes out whole, since the prompt's own text could not show it; one that begins in
    the prompt and never becomes valid stays the prompt's, and no U+FFFD is given for it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        emitted_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_token_ids: Collection[int] = (),
    ) -> None:
        """`shown_token_ids`: special tokens that come out as text all the same.

        `emitted_token_ids`: tokens whose text went out before (replay); the next text follows on theirs
        exactly.

        Costs a few microseconds whatever the prompt's length.
        """
        self._table = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        if shown_token_ids:
            self._skipped = self._skipped.difference(shown_token_ids)
        tail = self._tail(prompt_token_ids)
        self._strip_pending = tokenizer.strips_leading_space and not tail
        self._held = tail[_decode(tail, "replace")[1] :]
        """Bytes of a character that is not complete."""
        self._held_from_prompt = bool(self._held)
        if emitted_token_ids:
            self.feed(emitted_token_ids)

    def __repr__(self) -> str:
        return f"<IncrementalDetokenizer held={self._held!r}>"

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens; empty while a character is incomplete."""
        return "".join(self.feed_each(token_ids))

    def feed_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text that became final with each of these tokens."""
        table, skipped, held = self._table, self._skipped, self._held
        texts = []
        for token_id in token_ids:  # The hot loop: once per token. C's decoder, and nothing around it.
            data = held if token_id in skipped else held + table[token_id]
            text, used = _decode(data, "replace")
            held = data[used:]
            texts.append(text)
        self._held = held
        if self._held_from_prompt or self._strip_pending:
            self._treat_first(texts)
        return texts

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        text, self._held = self._held.decode("utf-8", "replace"), b""
        return self._without_start(text) if text else text

    def _treat_first(self, texts: list[str]) -> None:
        first = next((index for index, text in enumerate(texts) if text), None)
        if first is not None:
            texts[first] = self._without_start(texts[first])

    def _without_start(self, text: str) -> str:
        """Treat the first text after the prompt: it may be the prompt's, or the space that encoding put in
        front.
        """
        if self._held_from_prompt:
            self._held_from_prompt = False
            return text.removeprefix(_REPLACEMENT)
        if self._strip_pending:
            self._strip_pending = False
            return text.removeprefix(" ")
        return text

    def _tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes: enough to hold all of a character that it ends in. Empty when it has no
        text.
        """
        pieces: list[bytes] = []
        missing = _LONGEST_CHARACTER_BYTES
        for token_id in reversed(prompt_token_ids):
            piece = b"" if token_id in self._skipped else self._table[token_id]
            pieces.append(piece)
            missing -= len(piece)
            if missing <= 0:
                break
        return b"".join(reversed(pieces))
