"""What services and the kernel say of a process: metrics pages, health, memory."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from meshkit.cli.processes import ProcessRecord

HTTP_TIMEOUT_S = 10.0
Page = Mapping[str, float]
"""Samples of a metrics page by name with labels, as they are written there."""


async def read_metrics(http_address: str) -> Page:
    """A service's metrics page."""
    lines = (await get(http_address, "/metrics"))[0].splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


async def read_count(http_address: str, name: str) -> float:
    """A counter of a service, summed over its labels; 0.0 before its first."""
    page = await read_metrics(http_address)
    return sum(value for sample, value in page.items() if sample.partition("{")[0] == name)


async def get(http_address: str, path: str) -> tuple[str, Mapping[str, str]]:
    """Body and headers of an answer, whatever its status. Raises OSError."""

    def ask() -> tuple[str, Mapping[str, str]]:
        try:
            with urllib.request.urlopen(f"http://{http_address}{path}", timeout=HTTP_TIMEOUT_S) as reply:
                return reply.read().decode(), dict(reply.headers)
        except urllib.error.HTTPError as error:
            return error.read().decode(), dict(error.headers)

    return await asyncio.to_thread(ask)


def quantile_bound(before: Page, after: Page, name: str, *, quantile: float) -> float | None:
    """Upper bound of a histogram's quantile over what it gained between two pages: the edge of its bucket,
    which may be infinite. None where it gained nothing.
    """
    gained = sorted(
        (_edge(sample), value - before.get(sample, 0.0))
        for sample, value in after.items()
        if sample.startswith(f"{name}_bucket")
    )
    if not gained or not gained[-1][1]:
        return None
    return next(edge for edge, count in gained if count >= quantile * gained[-1][1])


def _edge(sample: str) -> float:
    found = re.search(r'le="([^"]+)"', sample)
    if found is None:
        raise ValueError(f"{sample} is no bucket of a histogram")
    return float(found.group(1))


def resident_bytes(process: ProcessRecord) -> int:
    """Memory of a process that is in use now."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0
