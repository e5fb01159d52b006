"""`chipmesh swap`: another chip under the same worker id, while its streams run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.backend_options import read_backend_options
from meshkit.cli.scheduler_channel import open_scheduler
from meshkit.cli.state import require_endpoint, state_dir_from_environment
from meshkit.cli.terminal import print_json
from meshkit.errors import Unavailable

Show = Callable[[admin_pb2.SwapChipResponse], None]


@dataclass(frozen=True)
class NewChips:
    """What a worker is to run on. backend: "" for the present one. devices: one for each rank; none: 0.
    options: KEY=VALUE for the plugin. Sizes: None: as the worker chooses.
    """

    backend: str
    devices: Sequence[int]
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    options: Sequence[str]

    def request(self, worker: str, *, model_path: str, never_pause: bool) -> admin_pb2.SwapChipRequest:
        """The call that asks for them."""
        alone = len(self.devices) < 2
        return admin_pb2.SwapChipRequest(
            worker=worker,
            backend=self.backend,
            device=next(iter(self.devices), 0) if alone else 0,
            devices=() if alone else self.devices,
            tensor_parallel_size=self.tensor_parallel_size or 0,
            pipeline_parallel_size=self.pipeline_parallel_size or 0,
            backend_options=read_backend_options(self.options, flag="--option"),
            model_path=model_path,
            never_pause=never_pause,
        )


def swap_chip(
    worker: str,
    *,
    chips: NewChips,
    model_path: str,
    never_pause: bool,
    endpoint: str | None,
    as_json: bool,
    tls: Path | None = None,
) -> None:
    """Swap, show the stages as they come, and say how long it took. tls: as for `open_scheduler`.

    Raises:
        MeshError: the worker is not there, or the new executor did not start: the old one serves on, or is
            loaded again where it had to make room.
    """
    request = chips.request(worker, model_path=model_path, never_pause=never_pause)
    address = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    begun = time.monotonic()
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as bars:
        bar = bars.add_task(worker, total=1.0)

        def show(progress: admin_pb2.SwapChipResponse) -> None:
            bars.update(bar, description=f"{worker}: {progress.stage}", completed=progress.fraction)

        stages = asyncio.run(_swap(address, request, show, tls))
    seconds = round(time.monotonic() - begun, 3)
    if as_json:
        print_json({"worker": worker, "backend": chips.backend, "stages": stages, "seconds": seconds})
    else:
        print(f"{worker} runs on {chips.backend or 'the same chip, loaded anew'} now ({seconds:.1f} s)")


async def _swap(address: str, request: admin_pb2.SwapChipRequest, show: Show, tls: Path | None) -> list[str]:
    """The stages that came, in order, each once."""
    stages: list[str] = []
    last = ""
    async with open_scheduler(address, tls=tls) as channel:
        async for progress in admin_pb2_grpc.AdminServiceStub(channel).SwapChip(request):
            show(progress)
            last = progress.stage
            if last not in stages:
                stages.append(last)
    if last != "done":
        raise Unavailable(
            f"the scheduler ended the swap after stage {last or 'none'!r}; see `chipmesh status`"
        )
    return stages
