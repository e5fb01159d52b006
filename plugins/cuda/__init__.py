"""The `cuda` plugin: NVIDIA GPUs through torch, FlashInfer and Triton where they are, and NCCL."""

from __future__ import annotations

from collections.abc import Mapping

from plugins.sdk.backend import Backend


def backend(options: Mapping[str, str]) -> Backend:
    """Start the plugin.

    options: as plugins.cuda.options.

    Raises:
        InvalidArgument: an unknown option, or a value out of range.
        FailedPrecondition: no GPU can be used here (NO_DEVICE; the message lists what was looked for), or one
            is there but cannot run this torch, or the process used torch.cuda before.
    """
    # CUDA reads its environment when it starts: nothing here imports torch before open_runtime.
    from plugins.cuda.options import read_options  # noqa: PLC0415
    from plugins.cuda.runtime import open_runtime  # noqa: PLC0415

    read = read_options(options)
    runtime = open_runtime(read)
    from plugins.cuda.plugin import CudaBackend  # noqa: PLC0415

    return CudaBackend(runtime, read.communication)
