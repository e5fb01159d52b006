"""The `cpu` plugin: a native kernel for whole steps of Llama models, torch and oneDNN for everything else,
gloo for collectives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from plugins.sdk.backend import Backend

_SPIN_COUNT = "10000"
"""How long torch's threads (libgomp) spin between two parallel regions. By default they spin for
milliseconds: when another process wants the same cores, a second executor or the gateway, every region then
waits for a time slice, measured 7 times slower on 2 cores. This bridges the gap between two operators.
"""


def backend(options: Mapping[str, str]) -> Backend:
    """Start the plugin.

    options: `threads`, compute threads, at least 1; by default torch's choice, which follows OMP_NUM_THREADS.
    `devices`: places for executors, which share the processors; by default one for each processor.
    `kernel`: auto (default), off, or an instruction set (avx512_vnni, avx512, avx2, baseline) for the native
    step kernel. `all_reduce_border`, `overlap_rows`: as plugins.sdk.communication has them.

    Raises:
        InvalidArgument: an unknown option, or a value out of range.
    """
    # Read when torch is loaded; what the operator of the host has set goes first.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    # torch takes a second to import: only when this plugin was chosen.
    from plugins.cpu.options import read_options  # noqa: PLC0415
    from plugins.cpu.plugin import CpuBackend  # noqa: PLC0415

    return CpuBackend(read_options(options))
