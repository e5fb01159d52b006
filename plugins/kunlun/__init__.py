"""The `kunlun` plugin: Kunlun XPUs through torch_xmlir and kunlun_ops, XCCL for collectives."""

from __future__ import annotations

from collections.abc import Mapping

from plugins.sdk.backend import Backend


def backend(options: Mapping[str, str]) -> Backend:
    """Start the plugin.

    options: as plugins.kunlun.options; `emulate=true` binds it to the emulator of the vendor's runtime.

    Raises:
        InvalidArgument: an unknown option, or a value out of range.
        FailedPrecondition: the vendor's runtime is not here (the message lists what was looked for and
        where), does not start, or consists of versions that do not go together.
    """
    # The runtime reads its environment when torch is loaded: nothing here imports torch before open_runtime.
    from plugins.kunlun.options import read_options  # noqa: PLC0415
    from plugins.kunlun.runtime import open_runtime  # noqa: PLC0415

    read = read_options(options)
    runtime = open_runtime(read)
    from plugins.kunlun.plugin import KunlunBackend  # noqa: PLC0415

    return KunlunBackend(runtime, read.communication)
