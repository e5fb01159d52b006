"""`keys new`: a key for a client of a gateway, and the entry that lets it in."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from typing import Any

from meshkit.cli.gateway_channel import API_KEY_VARIABLE
from meshkit.cli.terminal import print_json
from meshkit.errors import InvalidArgument

_KEY_PREFIX = "cmk_"
"""By it, people and scanners see what the rest is."""
_KEY_BYTES = 32
# As the gateway's ApiKeyConfig has it: a command imports no service. A test holds the two together.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def new_key(
    name: str,
    *,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_live_requests: int | None = None,
    share_cache: bool = False,
    operator: bool = False,
    as_json: bool = False,
) -> None:
    """Print a new key, this once, and the entry for the gateway's `api_keys` that lets it in.

    The limits are written into the entry; None: no limit. operator: see ApiKeyConfig.

    Raises:
        InvalidArgument: no key can have that name.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"NAME is {name!r}; 1 to 64 letters, digits, '.', '_' and '-' are allowed, and it begins with a "
            "letter or digit",
            field="name",
        )
    key = _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_live_requests": max_live_requests,
        "share_cache": share_cache or None,
        "operator": operator or None,
    }
    entry: dict[str, Any] = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    entry.update((field, value) for field, value in limits.items() if value is not None)
    if as_json:
        print_json({"key": key, "entry": entry})
        return
    print(key)
    print(
        "The line above is the key: keep it, it is not shown again; "
        f"`chipmesh` takes it from {API_KEY_VARIABLE}.\n"
        "The gateway needs only this, as an entry of api_keys or of api_keys_file:",
        file=sys.stderr,
    )
    print(json.dumps(entry), file=sys.stderr)
