"""Memory: the host's, as torch tensors.

REPLACE: for devices that your torch build knows derive from plugins.sdk.torch_memory.TorchMemory and bring
`_place` (a torch.device), `stats` (your driver's figures) and `_synchronize`. For memory that torch does not
know derive from plugins.sdk.memory.PooledMemory; `copy`, `upload` and `download` are your runtime's then.
"""

from __future__ import annotations

from plugins.sdk.torch_memory import TorchHostMemory


class ExampleMemory(TorchHostMemory):
    """`relayout_weight` is inherited: weights stay as they are."""

    # REPLACE: override relayout_weight where your matrix product wants another layout; see plugins/cpu.
