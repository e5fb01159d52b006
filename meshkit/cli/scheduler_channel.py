"""How a command reaches a scheduler: in plain text on this host, else with an operator's certificate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

from meshkit.cli.generation import translated_errors
from meshkit.config import TlsConfig
from meshkit.errors import Unavailable
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role

TLS_VARIABLE = "CHIPMESH_TLS"


@contextlib.asynccontextmanager
async def open_scheduler(address: str, *, tls: Path | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the scheduler at `address`, and gRPC's errors within as ours.

    tls: folder with certificate.pem, key.pem and authority.pem, as `chipmesh certs create` writes one;
        None: what CHIPMESH_TLS names, and plain text where it is not set.

    Raises:
        InvalidArgument: the folder lacks a file, or one cannot be used.
        Unavailable: no scheduler answers, or not to our certificate.
    """
    files = tls_files(tls)
    async with open_channel(address, tls=files, role=Role.SCHEDULER) as channel:
        try:
            with translated_errors(address, service="scheduler"):
                yield channel
        except Unavailable as error:
            if files is None:
                error.message += f"; one that asks for certificates needs --tls DIR or {TLS_VARIABLE}"
            raise


def tls_files(folder: Path | None) -> TlsConfig | None:
    """The files of `folder`, or of the one that CHIPMESH_TLS names; None where neither is given."""
    given = str(folder) if folder is not None else os.environ.get(TLS_VARIABLE, "")
    if not given:
        return None
    root = Path(given)
    return TlsConfig(
        certificate=root / "certificate.pem", key=root / "key.pem", authority=root / "authority.pem"
    )
