"""What the hash model must answer, written from its definition alone: shares no code with the runner."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def continue_tokens(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that follow `prompt` (any number of tokens, each in [0, vocab_size))."""
    digest = hashlib.sha256(b"chipmesh-hash-model").digest()
    for token in prompt:
        digest = hashlib.sha256(digest + struct.pack(">I", token)).digest()
    answer: list[int] = []
    for _ in range(count):
        token = struct.unpack(">Q", digest[:8])[0] % vocab_size
        answer.append(token)
        digest = hashlib.sha256(digest + struct.pack(">I", token)).digest()
    return answer
