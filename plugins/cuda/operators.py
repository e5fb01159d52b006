"""Operators on NVIDIA GPUs. Tensor code here takes its device from the inputs, so that it is tested on the
host too; what only a GPU can run stands behind `attention` and `norms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plugins.cuda import quantised
from plugins.cuda.attention import Attention
from plugins.cuda.norms import Norms
from plugins.cuda.runtime import Runtime
from plugins.sdk import torch_attention
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference import sampling


class CudaOperators(OperatorSet):
    """All but `qkv_rotary`, which would be no more than its parts here: the framework runs those."""

    def __init__(
        self,
        memory: MemoryManager,
        runtime: Runtime,
        attention: Attention,
        norms: Norms,
        *,
        declined: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(memory, declined=declined)
        self._runtime = runtime
        self._attention = attention
        self._norms = norms

    def torch_device(self, device: int) -> torch.device:
        """`cuda:N`."""
        return self._runtime.place(device)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """torch's gather of rows."""
        return functional.embedding(token_ids, weight)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """cuBLAS, by the precision that plugins.cuda.runtime.settle_precision asks for."""
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As chosen at start."""
        return self._norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As chosen at start."""
        return self._norms.add_rms_norm(x, residual, weight, eps)

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """As the reference: one look-up for both; in float32, rounded once."""
        return reference.rotary(query, key, positions, cos_sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Two launches, no concatenation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        """Rows copied by index."""
        flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
        flat[0].index_copy_(0, cells, key.to(kv_cache.dtype))
        flat[1].index_copy_(0, cells, value.to(kv_cache.dtype))

    def attention_prefill(
        self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float
    ) -> Tensor:
        """As chosen at start."""
        return self._attention.prefill(query, kv_cache, page_ids, start, scale)

    def attention_decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """As chosen at start; lengths say what the mask says."""
        return self._attention.decode(query, kv_cache, page_table, lengths, scale)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Two launches, no concatenation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def attention_prefill_bounded(
        self,
        query: Tensor,
        kv_cache: Tensor,
        page_ids: Tensor,
        start: int,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> Tensor:
        """torch's products over the gathered pages that the window reaches."""
        return torch_attention.prefill_bounded(query, kv_cache, page_ids, start, scale, window, soft_cap)

    def attention_decode_bounded(
        self,
        query: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> Tensor:
        """The same for all rows at once, without waiting for their lengths."""
        return torch_attention.decode_bounded(query, kv_cache, page_table, lengths, scale, window, soft_cap)

    def argmax(self, logits: Tensor) -> Tensor:
        """torch's own, which promises the first among equals."""
        return logits.argmax(dim=-1)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        """As the reference, in float64 on the device, without sorting what no filter asks for."""
        scores = sampling.scaled_scores(logits, temperature)
        floor = sampling.min_p_floor(min_p)
        if bool(((top_k > 0) | (top_p < 1)).any()):
            ordered = scores.sort(dim=-1, descending=True).values
            by_k = sampling.top_k_floor(ordered, top_k)
            by_p, found = sampling.top_p_floor(scores, ordered, by_k, top_p)
            floor = torch.maximum(floor, torch.maximum(by_k, by_p.masked_fill(~found, float("-inf"))))
        return sampling.draw(scores, floor, uniform)

    def moe_route(self, router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
        """By a stable sort: topk promises no order among equals, and which of them it keeps."""
        shares = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
        weights, expert_ids = shares.sort(dim=-1, descending=True, stable=True)
        weights, expert_ids = weights[:, :top_k], expert_ids[:, :top_k]
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.contiguous(), expert_ids.contiguous()

    def moe_experts(self, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Rows sorted by expert, each expert's product once."""

        def feed_forward(rows: Tensor, expert: int) -> Tensor:
            inner = self.silu_mul(functional.linear(rows, gate_up[expert]))
            return functional.linear(inner, down[expert])

        return quantised.mix_experts(x, weights, expert_ids, gate_up.shape[0], feed_forward)

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        """int8 tensor cores; rows that they need beyond those given are padded inside."""
        return quantised.linear_w8a8(x, weight, scale, bias)

    def moe_experts_w8a8(
        self,
        x: Tensor,
        gate_up: Any,
        gate_up_scale: Any,
        down: Any,
        down_scale: Any,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        """As moe_experts, by linear_w8a8."""

        def feed_forward(rows: Tensor, expert: int) -> Tensor:
            joined = quantised.linear_w8a8(rows, gate_up[expert], gate_up_scale[expert], None)
            return quantised.linear_w8a8(self.silu_mul(joined), down[expert], down_scale[expert], None)

        return quantised.mix_experts(x, weights, expert_ids, gate_up.shape[0], feed_forward)

    def linear_w4a16(
        self, x: Tensor, weight: Any, scale: Any, zero: Any, bias: Tensor | None = None
    ) -> Tensor:
        """Weights in x's dtype for the time of the call, then cuBLAS: on tensor cores for 16-bit dtypes."""
        return functional.linear(x, quantised.dequantise_w4(weight, scale, zero, x.dtype), bias)

    def moe_experts_w4a16(
        self,
        x: Tensor,
        gate_up: Any,
        gate_up_scale: Any,
        gate_up_zero: Any,
        down: Any,
        down_scale: Any,
        down_zero: Any,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        """As moe_experts, by linear_w4a16."""

        def feed_forward(rows: Tensor, expert: int) -> Tensor:
            first = (gate_up[expert], gate_up_scale[expert], gate_up_zero[expert])
            second = (down[expert], down_scale[expert], down_zero[expert])
            return self.linear_w4a16(self.silu_mul(self.linear_w4a16(rows, *first)), *second)

        return quantised.mix_experts(x, weights, expert_ids, gate_up.shape[0], feed_forward)
