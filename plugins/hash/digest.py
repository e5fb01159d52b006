"""The chain of digests that the hash model is, and the token that a digest stands for."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 32
SEED = hashlib.sha256(b"chipmesh-hash-model").digest()
"""Digest before the first token."""


def extend(digest: bytes, token_bytes: bytes) -> bytes:
    """Digest after one more token; `token_bytes` is the token as 4 bytes, big-endian."""
    return hashlib.sha256(digest + token_bytes).digest()


def token_of(digest: bytes, vocab_size: int) -> int:
    """The token that follows all tokens that `digest` has seen."""
    return int.from_bytes(digest[:8], "big") % vocab_size
