"""Collectives over gloo, through torch.distributed's process group without its global state."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import distributed

from plugins.sdk.communication import Border
from plugins.sdk.process_group import ProcessGroupCollectives

_BORDER_BYTES = 128 << 10


def gloo_is_available() -> bool:
    """Whether this torch was built with gloo."""
    return bool(distributed.is_available() and distributed.is_gloo_available())


class GlooCollectives(ProcessGroupCollectives):
    """Host tensors over gloo."""

    _library_algorithm: ClassVar[str] = "ring"

    @property
    def library(self) -> str:
        """gloo has no version of its own: it comes with torch."""
        return f"gloo (torch {torch.__version__})"

    def _open_group(self, name: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        gloo: Any = distributed.ProcessGroupGloo  # whose options are in no stub
        if not self._on_one_host:
            return gloo(store, rank, world_size, timeout)
        # By itself it listens where the host's name leads, which is beyond this host.
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return gloo(store, rank, world_size, options)

    def _border(self, world_size: int) -> Border:
        """Measured: between two ranks the ring is as fast at every size; from three on it takes longer."""
        return 0 if world_size <= 2 else _BORDER_BYTES

    def _set_limit(self, process_group: Any, timeout: timedelta) -> None:
        # Its public name, set_timeout, is newer than torch 2.5.
        process_group._set_default_timeout(timeout)
