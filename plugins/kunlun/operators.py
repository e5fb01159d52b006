"""Operators through kunlun_ops; products, look-ups, argmax by torch, whose kernels the runtime replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from meshkit.errors import FailedPrecondition
from plugins.kunlun import moe, quantised
from plugins.kunlun.decode import DecodeVariant
from plugins.kunlun.runtime import Runtime
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import routing, sampling

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
PAGE_SIZES = (16, 64, 128)
KV_LAYOUT = KvLayout(("kv", "page", "head", "token", "value"))
"""The kernels' (2, blocks, kv heads, block, head size)."""

_FLOAT_OPERATORS = (
    "linear", "rms_norm", "add_rms_norm", "rotary", "silu_mul", "write_kv", "attention_prefill",
    "attention_decode", "moe_route",
)  # fmt: skip
_EXPERT_DTYPES = ("bfloat16", "float16")
"""No use of the experts' kernels in float32 is known."""
_INT8_DTYPES = ("bfloat16",)
"""gemm_I8_I8_bf16_nt gives no other."""
_HEADS = f"D in {HEAD_DIMS}"
_PAGES = f"S in {PAGE_SIZES}"
CONSTRAINTS: Mapping[str, Sequence[str]] = {
    "write_kv": (_HEADS, _PAGES),
    "attention_prefill": (_HEADS, _PAGES, "H % G == 0"),
    "attention_decode": (_HEADS, _PAGES, "H % G == 0"),
    "linear_w8a8": ("K % 16 == 0", "N % 16 == 0"),
    "moe_experts_w8a8": ("K % 16 == 0", "I % 16 == 0"),
}
"""In the symbols of the operator catalogue: D head size, S page size, H query heads, G key/value heads; K, N
and I are widths. int8 products are known to be used with multiples of 16 only.
"""
_4_BITS_REASON = (
    "how kunlun_ops' 4-bit kernels (dequant_int4, awq_gemm, gptq_gemm) want nibbles, zero points and groups "
    "laid out is not known"
)
_UNCOVERED: Mapping[str, str] = {
    "linear_w4a16": _4_BITS_REASON,
    "moe_experts_w4a16": _4_BITS_REASON,
    "qkv_rotary": "kunlun_ops has no kernel of it",
}
_SAMPLE_REASON = (
    "draws are counter-based in float64, which is off on the chip: the framework's reference runs on the host"
)


@dataclass(frozen=True)
class Findings:
    """What only the runtime itself can tell, found by trial when the plugin starts (plugins.kunlun.probes).

    prefix_is_causal: the flag under which the prefix path of prefill masks causally.
    decode: the build's decode kernel and how it takes the scale; None: none agrees with the reference.
    int8_product: the build's product of int8 matrices.
    """

    prefix_is_causal: bool
    decode: DecodeVariant | None
    int8_product: str = quantised.PRODUCTS[0]


class KunlunOperators(OperatorSet):
    """What kunlun_ops has kernels for. Caches are [2, pages, page, g, d] as everywhere, in the kernels' order
    in memory.
    """

    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {
        **dict.fromkeys(_FLOAT_OPERATORS, DTYPES),
        "moe_experts": _EXPERT_DTYPES,
        "linear_w8a8": _INT8_DTYPES,
        "moe_experts_w8a8": _INT8_DTYPES,
    }
    constraints: ClassVar[Mapping[str, Sequence[str]]] = CONSTRAINTS
    kv_layout: ClassVar[KvLayout] = KV_LAYOUT

    def __init__(
        self,
        memory: MemoryManager,
        runtime: Runtime,
        findings: Findings,
        *,
        declined: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(memory, declined={"sample": _SAMPLE_REASON, **(declined or {})})
        self._runtime = runtime
        self._ops = runtime.ops
        self._findings = findings
        self._lengths: tuple[Tensor, Tensor, Tensor] | None = None

    def torch_device(self, device: int) -> torch.device:
        """`cuda:N`: so the chip appears."""
        return self._runtime.torch_device(device)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """torch's gather of rows."""
        return functional.embedding(token_ids, weight)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """torch's product; the runtime wants one dtype throughout."""
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """kunlun_ops.rmsnorm."""
        x = x.contiguous()
        output = torch.empty_like(x)
        self._ops.rmsnorm(x, weight.contiguous(), output, eps)
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """kunlun_ops.add_rmsnorm."""
        x, residual = x.contiguous(), residual.contiguous()
        output, total = torch.empty_like(x), torch.empty_like(x)
        self._ops.add_rmsnorm(
            x, residual, weight=weight.contiguous(), eps=eps, output=output, residual_output=total
        )
        return output, total

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """kunlun_ops.rotary_embedding, on copies: it works in place. The table has to have query's dtype, so
        only the rows in use are converted, and looked up by their own order.
        """
        rotated = [part.flatten(1).clone(memory_format=torch.contiguous_format) for part in (query, key)]
        table = cos_sin[positions].to(query.dtype)
        rows = torch.arange(table.shape[0], dtype=positions.dtype, device=positions.device)
        self._ops.rotary_embedding(rows, rotated[0], rotated[1], query.shape[-1], table, True)
        return rotated[0].view(query.shape), rotated[1].view(key.shape)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """kunlun_ops.swiglu."""
        output = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        self._ops.swiglu(gate_up.contiguous(), output)
        return output

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        """kunlun_ops.reshape_and_cache: the _flash variant is wrong for more than one key/value head."""
        keys, values = self._caches(kv_cache)
        rows = (part.to(keys.dtype).contiguous() for part in (key, value))
        self._ops.reshape_and_cache(*rows, keys, values, cells.to(torch.int32))

    def attention_prefill(
        self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float
    ) -> Tensor:
        """kunlun_ops.prefill_attention by its prefix path, which reads the pages where they are. The kernel
        applies 1 / sqrt(d) itself and multiplies by alpha.
        """
        keys, values = self._caches(kv_cache)
        count, _, size = query.shape
        x = query.to(keys.dtype).contiguous()
        out = torch.empty_like(x)
        queries, held = self._cumulative(count, x), self._cumulative(start + count, x)
        self._ops.prefill_attention(
            q=x,
            k=keys,
            v=values,
            out=out,
            is_causal=self._findings.prefix_is_causal,
            is_prefix_cache=True,
            block_table=page_ids.to(torch.int32).unsqueeze(0),
            alpha=scale * math.sqrt(size),
            context_qlen_lod_cpu=queries[0],
            context_qlen_lod_xpu=queries[1],
            context_kvlen_lod_cpu=held[0],
            context_kvlen_lod_xpu=held[1],
            alibi_slopes=None,
            softmax_lse=None,
            swa_left=-1,
            swa_right=-1,
            sink=None,
        )
        return out.to(query.dtype)

    def attention_decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """The build's decode kernel."""
        if self._findings.decode is None:
            raise FailedPrecondition("kunlun_ops has no decode attention", reason="OPERATOR_NOT_NATIVE")
        keys, values = self._caches(kv_cache)
        x = query.to(keys.dtype).contiguous()
        on_host, on_device = self._both_sides(lengths)
        out = self._findings.decode.run(
            self._ops, x, keys, values, page_table.to(torch.int32).contiguous(), on_host, on_device, scale
        )
        return out.to(query.dtype)

    def argmax(self, logits: Tensor) -> Tensor:
        """torch's own."""
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
        """The reference on the host: a chip without float64 would draw other tokens than its peers."""
        settings = (each.cpu() for each in (temperature, top_k, top_p, min_p, uniform))
        return sampling.sample(logits.cpu(), *settings).to(logits.device)

    def moe_route(self, router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
        """kunlun_ops.moe_softmax_topk_norm, which always divides by the sum; torch's sort without that."""
        if not renormalize:
            return routing.moe_route(router_logits, top_k, renormalize)
        return moe.route(self._ops, router_logits, top_k)

    def moe_experts(self, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """kunlun_ops.moe_pre_sorted, moe_fc, swiglu, moe_fc, moe_post."""
        return moe.mix_experts(
            self._ops,
            x,
            weights,
            expert_ids,
            experts=gate_up.shape[0],
            gate_up=moe.float_product(self._ops, gate_up),
            down=moe.float_product(self._ops, down),
        )

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        """kunlun_ops.quant2d, then the build's int8 product."""
        return quantised.multiply(self._ops, self._findings.int8_product, x, weight, scale, bias)

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
        """As moe_experts, with kunlun_ops.quant2d before each moe_fc."""
        return moe.mix_experts(
            self._ops,
            x,
            weights,
            expert_ids,
            experts=gate_up.shape[0],
            gate_up=moe.int8_product(self._ops, gate_up, gate_up_scale),
            down=moe.int8_product(self._ops, down, down_scale),
        )

    def _why_reference(self, name: str, dtype: str | None = None) -> str:
        return _UNCOVERED.get(name) or super()._why_reference(name, dtype)

    def _reference(self, name: str) -> Callable[..., Any]:
        return self.sample if name == "sample" else super()._reference(name)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, g, page, d], contiguous."""
        _check_sizes(kv_cache)
        keys, values = self.kv_layout.in_memory(kv_cache).unbind(0)
        return keys, values

    def _cumulative(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Lengths of one sequence as the kernels want them, cumulative int32, on the host and the device."""
        host = torch.tensor([0, length], dtype=torch.int32)
        return host, self._runtime.to_device(host, like)

    def _both_sides(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """int32 on the host and the device. All layers of a step bring the same tensor: the device is waited
        for once a step.
        """
        if self._lengths is None or self._lengths[0] is not lengths:
            host = lengths.cpu().to(torch.int32)
            self._lengths = (lengths, host, self._runtime.to_device(host, lengths))
        return self._lengths[1], self._lengths[2]


def _check_sizes(kv_cache: Tensor) -> None:
    """The kernels exist for these sizes only, and nobody promises that they notice another one."""
    _, _, page, _, size = kv_cache.shape
    if size not in HEAD_DIMS:
        raise FailedPrecondition(
            f"the model's head size is {size}; this chip's attention takes {', '.join(map(str, HEAD_DIMS))}",
            field="model_path",
            reason="HEAD_DIM_UNSUPPORTED",
        )
    if page not in PAGE_SIZES:
        raise FailedPrecondition(
            f"page_size is {page}; this chip's attention takes {', '.join(map(str, PAGE_SIZES))}",
            field="page_size",
            reason="PAGE_SIZE_UNSUPPORTED",
        )
