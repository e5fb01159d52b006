"""Token ids as bytes, four each: prefixes are compared by memcmp and hashed as they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TOKEN_BYTES = 4
_CODE = "I" if array("I").itemsize == TOKEN_BYTES else "L"


class Namespace(NamedTuple):
    """What must be equal, beside the tokens, for two requests to share a prefix on one replica.

    The rest of a prefix's identity (model, weight version, numeric class, KV layout and scales) is the same
    for all requests of a replica: each replica has its own tree, and a new executor is a new replica.
    """

    salt: str = ""
    adapter: str = ""


def token_key(tokens: Sequence[int]) -> bytes:
    """The key of `tokens`, each in [0, 2³²); 4 bytes a token in the machine's order.

    Raises:
        OverflowError: a token is out of range.
    """
    return array(_CODE, tokens).tobytes()


def key_tokens(key: bytes, start: int, end: int) -> list[int]:
    """The tokens [start, end) of a key."""
    return array(_CODE, key[start * TOKEN_BYTES : end * TOKEN_BYTES]).tolist()


def common_bytes(a: bytes, b: bytes, *, a_start: int = 0, b_start: int = 0, most: int | None = None) -> int:
    """How many bytes, `most` of them, agree from `a_start` in `a` and `b_start` in `b`, in whole tokens."""
    count = min(len(a) - a_start, len(b) - b_start) // TOKEN_BYTES
    if most is not None:
        count = min(count, most // TOKEN_BYTES)
    left = np.frombuffer(a, np.uint32, count, a_start)
    right = np.frombuffer(b, np.uint32, count, b_start)
    differs = left != right
    first = int(differs.argmax()) if count else 0
    return (first if count and differs[first] else count) * TOKEN_BYTES
