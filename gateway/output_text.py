"""One output's text: detokenised as tokens come, cut at stop strings, remembered per token for readers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from gateway.text import IncrementalDetokenizer, StopMatcher


class OutputText:
    """Text that became certain, with the place that each token ends at.

    It is kept as UTF-8 with four bytes of index per token: a slow or resuming reader then costs no more than
    that, and gets the very text that any other reader gets, wherever it begins.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer | None, *, stop_strings: Sequence[str], min_tokens: int = 0
    ) -> None:
        """detokenizer: None for a model without text, whose output then has none.

        min_tokens: stop strings are not looked for before the output has so many tokens.
        """
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._min_tokens = min_tokens
        self._bytes = bytearray()
        self._ends = array("I")

    def __repr__(self) -> str:
        return f"<OutputText {len(self._bytes)} bytes of {len(self._ends)} tokens>"

    @property
    def end(self) -> int:
        """How many bytes of text are certain."""
        return len(self._bytes)

    @property
    def matched(self) -> str | None:
        """The stop string that was found so far."""
        return None if self._matcher is None else self._matcher.matched

    def end_after(self, token_count: int) -> int:
        """How many bytes of text were certain after the first `token_count` tokens."""
        if self._detokenizer is None or token_count == 0:
            return 0
        return self._ends[token_count - 1]

    def between(self, start: int, end: int) -> str:
        """The text from byte `start` to `end`, both given by this object."""
        return self._bytes[start:end].decode()

    def add(self, token_ids: Sequence[int]) -> int:
        """Take in the next tokens; how many: all, or up to the one that completes a stop string."""
        if self._detokenizer is None:
            return len(token_ids)
        texts = self._detokenizer.feed_each(token_ids)
        if self._matcher is not None:
            return self._add_watching(texts, self._matcher)
        certain, ends = self._bytes, self._ends
        for text in texts:
            certain += text.encode()
            ends.append(len(certain))
        return len(texts)

    def flush(self) -> str | None:
        """The output ends here: what was held back comes out. A stop string that this completes, or None."""
        if self._detokenizer is None:
            return None
        text = self._detokenizer.flush()
        if self._matcher is not None:
            text = self._matcher.feed(text).text_to_emit + self._matcher.flush().text_to_emit
        self._bytes += text.encode()
        return self.matched

    def _add_watching(self, texts: Sequence[str], matcher: StopMatcher) -> int:
        for count, text in enumerate(texts, start=1):
            is_watched = len(self._ends) + 1 >= self._min_tokens
            certain = matcher.feed(text).text_to_emit if is_watched else text
            self._bytes += certain.encode()
            self._ends.append(len(self._bytes))
            if matcher.matched is not None:
                return count
        return len(texts)
