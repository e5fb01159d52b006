"""What a launch tells while it works: one event type, shown on a terminal or sent as JSON lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from meshkit.cli.state import MeshRecord
from meshkit.config import FrozenConfig


class LaunchEvent(FrozenConfig):
    """One step of a launch.

    started: `service` runs as `pid`. progress: `service` is at `fraction` (0 to 1) of `stage`.
    ready: `service` serves at `address`. up: everything does, see `mesh`. failed: `error` as JSON.
    lost: `service` ended by itself (`message`). stopping, stopped: `service` is asked to end, has ended
    (`message` where it was killed).
    """

    kind: Literal["started", "progress", "ready", "up", "failed", "lost", "stopping", "stopped"]
    service: str = ""
    pid: int | None = None
    stage: str = ""
    fraction: float = 0.0
    address: str = ""
    message: str = ""
    error: dict[str, Any] | None = None
    mesh: MeshRecord | None = None


Report = Callable[[LaunchEvent], None]


def print_event(event: LaunchEvent) -> None:
    """The event as one JSON line on stdout: what a detached launch's parent reads."""
    print(event.model_dump_json(exclude_defaults=True), flush=True)
