"""How a command reaches a gateway: with the user's API key, and in TLS where an authority is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio

from meshkit.errors import InvalidArgument
from meshkit.rpc.channel import open_channel
from meshkit.rpc.keepalive import DEFAULT_MAX_MESSAGE_BYTES, client_options
from meshkit.rpc.tracing_client import client_tracing_interceptors

API_KEY_VARIABLE = "CHIPMESH_API_KEY"
AUTHORITY_VARIABLE = "CHIPMESH_GATEWAY_AUTHORITY"
WELL_KNOWN = "system"
"""Instead of a file: the authorities that grpc trusts by itself."""


@contextlib.asynccontextmanager
async def open_gateway(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the gateway at `address`.

    In plain text, unless CHIPMESH_GATEWAY_AUTHORITY names a PEM file of who signed the gateway's certificate,
    or says "system". The certificate has to be for the host in `address`. The variable is read at each call.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    async with await _open(address, os.environ.get(AUTHORITY_VARIABLE, "")) as channel:
        yield channel


async def _open(address: str, authority: str) -> grpc.aio.Channel:
    if not authority:
        return open_channel(address)
    roots = None if authority == WELL_KNOWN else await asyncio.to_thread(_read, Path(authority))
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(root_certificates=roots),
        options=client_options(DEFAULT_MAX_MESSAGE_BYTES),
        interceptors=client_tracing_interceptors(),
    )


def key_metadata() -> list[tuple[str, str]]:
    """What goes with each call to a gateway: the key of CHIPMESH_API_KEY, if any. Read at each call.

    Raises:
        InvalidArgument: what the variable holds cannot be sent. The text does not repeat it.
    """
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if not key:
        return []
    if not (key.isascii() and key.isprintable()):
        raise InvalidArgument(
            f"{API_KEY_VARIABLE} holds what no API key can: printable ASCII characters are allowed",
            field=API_KEY_VARIABLE,
        )
    return [("authorization", f"Bearer {key}")]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{AUTHORITY_VARIABLE}: {file} cannot be read: {error.strerror}; name a PEM file, or say "
            f"{WELL_KNOWN!r}",
            field=AUTHORITY_VARIABLE,
        ) from error
