"""The links between the services of a mesh, as proxies that can be cut. One for each pair that talks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from chaos.proxy import Proxy


def executor_link(worker: str) -> str:
    """Name of the scheduler's link to a worker's executor; that of its supervisor has the worker's."""
    return f"{worker}/executor"


def executor_socket(worker: str, *, root: Path) -> str:
    """Where a worker's executor listens, whichever it is: "unix:PATH"."""
    return f"unix:{root / f'{worker}.sock'}"


async def open_links(
    gateways: Iterable[str], workers: Iterable[str], *, scheduler: str, root: Path
) -> dict[str, Proxy]:
    """Proxies by name: that of a gateway and of a worker leads to the scheduler.

    scheduler: its address. root: the mesh's folder.
    """
    workers = list(workers)
    links = {name: Proxy(scheduler) for name in [*gateways, *workers]}
    for worker in workers:
        links[executor_link(worker)] = Proxy(executor_socket(worker, root=root))
    for link in links.values():
        await link.open()
    return links
