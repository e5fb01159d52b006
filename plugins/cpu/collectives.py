"""Collectives over gloo, through torch.distributed's process group without its global state."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from plugins.sdk.process_group import ProcessGroupCollectives


def gloo_is_available() -> bool:
    """Whether this torch was built with gloo."""
    return bool(distributed.is_available() and distributed.is_gloo_available())


class GlooCollectives(ProcessGroupCollectives):
    """Host tensors over gloo."""

    @property
    def library(self) -> str:
        """gloo has no version of its own: it comes with torch."""
        return f"gloo (torch {torch.__version__})"

    def _open_group(self, name: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        return distributed.ProcessGroupGloo(store, rank, world_size, timeout)

    def _set_limit(self, process_group: Any, timeout: timedelta) -> None:
        # Its public name, set_timeout, is newer than torch 2.5.
        process_group._set_default_timeout(timeout)
