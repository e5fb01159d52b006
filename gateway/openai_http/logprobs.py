"""Log-probabilities in the two shapes that OpenAI gives them, one for chats and one for completions."""

from __future__ import annotations

import codecs
import math
from typing import Any

from gateway.live_request import Output
from gateway.models import ServedModel

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_decoder_of_utf8 = codecs.getincrementaldecoder("utf-8")


def chat_logprobs(output: Output, model: ServedModel) -> list[dict[str, Any]]:
    """One entry for each token; its alternatives are not known."""
    return [
        {"token": token_text(token_id, model), "logprob": _finite(logprob), "bytes": _bytes(token_id, model),
         "top_logprobs": []}
        for token_id, logprob in zip(output.token_ids, output.logprobs, strict=True)
    ]  # fmt: skip


class CompletionLogprobs:
    """Tokens, values, and where in the text of the choice each token begins, in characters."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._decoder = _decoder_of_utf8("replace")
        self._offset = 0

    def of(self, output: Output) -> dict[str, Any]:
        """The entry of the next tokens."""
        return {
            "tokens": [token_text(token_id, self._model) for token_id in output.token_ids],
            "token_logprobs": [_finite(logprob) for logprob in output.logprobs],
            "top_logprobs": None,
            "text_offset": [self._advance(token_id) for token_id in output.token_ids],
        }

    def _advance(self, token_id: int) -> int:
        offset, text = self._offset, self._model.text
        if text is not None and not text.tokenizer.is_special(token_id):
            self._offset += len(self._decoder.decode(text.tokenizer.token_bytes[token_id]))
        return offset


def token_text(token_id: int, model: ServedModel) -> str:
    """The token as text; one that is a part of a character as its bytes, and one of a model without text as
    its id, as vLLM writes it.
    """
    if model.text is None:
        return f"token_id:{token_id}"
    content = model.text.tokenizer.token_bytes[token_id]
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _bytes(token_id: int, model: ServedModel) -> list[int] | None:
    return None if model.text is None else list(model.text.tokenizer.token_bytes[token_id])


def _finite(value: float) -> float:
    return max(value, LEAST) if math.isfinite(value) else LEAST
