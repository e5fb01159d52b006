"""The decode kernels that builds of kunlun_ops have, behind one call: which there is, how it is scaled."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeVariant:
    """kernel: its name in kunlun_ops. explicit_scale: it takes the scale; else it applies 1 / sqrt(d)."""

    kernel: str
    explicit_scale: bool

    def run(
        self,
        ops: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        lengths_on_device: Tensor,
        scale: float,
    ) -> Tensor:
        """query [b, h, d], caches [pages, g, page, d], tables int32 [b, pages], lengths int32 [b] -> [b, h,
        d].
        """
        if not self.explicit_scale and not math.isclose(scale * math.sqrt(query.shape[-1]), 1.0):
            query = query * (scale * math.sqrt(query.shape[-1]))
        out = torch.empty_like(query)
        if self.kernel == "paged_attention":
            ops.paged_attention(
                x=query,
                k_cache=keys,
                v_cache=values,
                block_tables=tables,
                context_lens_cpu=lengths,
                context_lens_xpu=lengths_on_device,
                is_context=False,
                is_causal=True,
                out=out,
                vo_head_dim=query.shape[-1],
            )
            return out
        # Builds that take the scale are those with windows and sinks.
        windows = {"max_window_size": -1, "sink": None} if self.explicit_scale else {}
        ops.speculative_attention(
            out=out.unsqueeze(0),
            q=query.unsqueeze(0),
            k_cache=keys,
            v_cache=values,
            context_lens_cpu=lengths,
            context_lens_xpu=lengths_on_device,
            batch_num=query.shape[0],
            qlen=1,
            max_context_len=int(lengths.max()),
            head_num=query.shape[1],
            head_dim=query.shape[2],
            scale=scale if self.explicit_scale else 0.0,
            kv_head_num=keys.shape[1],
            block_size=keys.shape[2],
            max_num_blocks_per_seq=tables.shape[1],
            block_tables=tables,
            **windows,
        )
        return out


def find_decode_variants(ops: ModuleType | Any) -> list[DecodeVariant]:
    """What to try, the likeliest first; the comparison with the reference decides."""
    variants: list[DecodeVariant] = []
    if hasattr(ops, "speculative_attention"):
        explicit = _takes_window(ops.speculative_attention)
        variants += [DecodeVariant("speculative_attention", choice) for choice in (explicit, not explicit)]
    if hasattr(ops, "paged_attention"):
        variants.append(DecodeVariant("paged_attention", False))
    return variants


def _takes_window(kernel: Any) -> bool:
    """Builds with `max_window_size` take the scale; a compiled function may not show its parameters."""
    try:
        return "max_window_size" in inspect.signature(kernel).parameters
    except ValueError:
        return True
