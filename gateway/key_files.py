"""The configured keys, read from where they lie, and watched: a key is added, changed or taken away while the
gateway runs. A content that cannot be used changes nothing; what is wrong is in the log and a metric.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import RootModel

from gateway.api_keys import ApiKey, digest_of
from gateway.config import ApiKeyConfig
from meshkit.config import parse_config
from meshkit.errors import InvalidArgument
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

MIN_KEY_CHARS = 16
_MAX_FILE_BYTES = 1024 * 1024


class ApiKeyList(RootModel[list[ApiKeyConfig]]):
    """Content of api_keys_file."""


def read_keys(configured: Sequence[ApiKeyConfig], keys_file: Path | None) -> tuple[ApiKey, ...]:
    """All keys: those of the configuration, then those of `keys_file`. Reads files: call it in a thread.

    Raises:
        InvalidArgument: a file or an entry cannot be used, or two have one name or key. The text has no key.
    """
    entries = [*configured, *(_read_entries(keys_file) if keys_file is not None else ())]
    keys = tuple(ApiKey(entry, _digests(entry)) for entry in entries)
    _check_distinct(keys)
    return keys


class KeyFiles:
    """Looks at all files of keys every `interval_s` seconds, and applies what changed."""

    def __init__(
        self,
        read: Callable[[], tuple[ApiKey, ...]],
        apply: Callable[[tuple[ApiKey, ...]], None],
        *,
        interval_s: float,
        on_error: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._read = read
        self._apply = apply
        self._interval_s = interval_s
        self._on_error = on_error
        self._sleep = sleep
        self._seen: tuple[ApiKey, ...] | None = None
        self.problem = ""
        """What is wrong with the present content; "" where it is in effect."""

    def __repr__(self) -> str:
        return f"<KeyFiles {self.problem or 'in effect'}>"

    async def load(self) -> None:
        """The first look.

        Raises:
            InvalidArgument: as `read_keys`.
        """
        self._take(await asyncio.to_thread(self._read))

    async def watch(self) -> None:
        """Look again and again; returns never."""
        while True:
            await self._sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Apply the content if it changed since the last look."""
        try:
            keys = await asyncio.to_thread(self._read)
        except InvalidArgument as error:
            if error.message != self.problem:
                self.problem = error.message
                self._on_error()
                log.error("API keys not in effect; the former ones stay", problem=error.message)
            return
        self.problem = ""
        if keys != self._seen:
            self._take(keys)

    def _take(self, keys: tuple[ApiKey, ...]) -> None:
        self._seen = keys
        self._apply(keys)
        log.info("API keys in effect", names=[key.config.name for key in keys])


def _read_entries(file: Path) -> list[ApiKeyConfig]:
    try:
        content = json.loads(_read_text(file, field="api_keys_file"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidArgument(f"api_keys_file: {file}: no JSON at {where}", field="api_keys_file") from None
    return parse_config(ApiKeyList, content, source=f"api_keys_file: {file}").root


def _digests(entry: ApiKeyConfig) -> tuple[bytes, ...]:
    if entry.sha256 is not None:
        return (bytes.fromhex(entry.sha256.get_secret_value()),)
    if entry.file is None:
        return ()
    where = f"api_keys: file of {entry.name!r}: {entry.file}"
    lines = [line.strip() for line in _read_text(entry.file, field="api_keys").splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise InvalidArgument(f"{where} holds no key", field="api_keys")
    if any(len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() for key in keys):
        raise InvalidArgument(
            f"{where} holds a key that cannot be one: at least {MIN_KEY_CHARS} printable ASCII characters "
            "are needed; `chipmesh keys new NAME` makes one",
            field="api_keys",
        )
    return tuple(digest_of(key) for key in keys)


def _read_text(file: Path, *, field: str) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(_MAX_FILE_BYTES)
    except UnicodeDecodeError:
        # Its own text repeats what the file holds.
        raise InvalidArgument(f"{field}: {file} is no text in UTF-8", field=field) from None
    except OSError as error:
        raise InvalidArgument(f"{field}: {file} cannot be read: {error.strerror}", field=field) from error


def _check_distinct(keys: Sequence[ApiKey]) -> None:
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for key in keys:
        name = key.config.name
        if name in names:
            raise InvalidArgument(
                f"api_keys: two have the name {name!r}; give each its own", field="api_keys"
            )
        names.add(name)
        for digest in key.digests:
            if owners.setdefault(digest, name) != name:
                raise InvalidArgument(
                    f"api_keys: {owners[digest]!r} and {name!r} have the same key; each needs its own",
                    field="api_keys",
                )
