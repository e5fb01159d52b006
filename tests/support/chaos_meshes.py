"""Meshes for fault tests, each used by all scenarios of its shape, and what a report of one must say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos.mesh import ChaosMesh, Shape

NO_HARM = dict.fromkeys(
    ("lost", "repeated", "wrong", "failed", "disordered", "miscounted", "leaked_pages"), 0
)


def harms(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a report counts of the harm done to clients; to be compared with NO_HARM."""
    return {name: report[name] for name in NO_HARM}


class Meshes:
    """The mesh of the present shape: scenarios of one shape share it, since each leaves it as it was."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mesh: ChaosMesh | None = None
        self._count = 0

    async def of(self, shape: Shape) -> ChaosMesh:
        """A mesh that has settled."""
        if self._mesh is None or self._mesh.shape != shape:
            await self.stop()
            self._count += 1
            self._mesh = ChaosMesh(shape, root=self._root / str(self._count))
            await self._mesh.start()
        return self._mesh

    async def stop(self) -> None:
        """Every service must end well."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            assert await mesh.stop() == []
