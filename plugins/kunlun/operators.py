"""Operators through kunlun_ops; products, look-ups, argmax by torch, whose kernels the runtime replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from meshkit.errors import FailedPrecondition
from plugins.kunlun.decode import DecodeVariant
from plugins.kunlun.runtime import Runtime
from plugins.sdk.capabilities import OperatorCapability
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import sampling

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
PAGE_SIZES = (16, 64, 128)
KV_LAYOUT = KvLayout(("kv", "page", "head", "token", "value"))
"""The kernels' (2, blocks, kv heads, block, head size)."""

_FLOAT_OPERATORS = (
    "linear", "rms_norm", "add_rms_norm", "rotary", "silu_mul", "write_kv", "attention_prefill",
    "attention_decode",
)  # fmt: skip
_HEADS = f"D in {HEAD_DIMS}"
_PAGES = f"S in {PAGE_SIZES}"
CONSTRAINTS: Mapping[str, Sequence[str]] = {
    "write_kv": (_HEADS, _PAGES),
    "attention_prefill": (_HEADS, _PAGES, "H % G == 0"),
    "attention_decode": (_HEADS, _PAGES, "H % G == 0"),
}
"""In the symbols of the operator catalogue: D head size, S page size, H query heads, G key/value heads."""
_SAMPLE_REASON = (
    "draws are counter-based in float64, which is off on the chip: the framework's reference runs on the host"
)


@dataclass(frozen=True)
class Findings:
    """What only the runtime itself can tell, found by trial when the plugin starts (plugins.kunlun.probes).

    prefix_is_causal: the flag under which the prefix path of prefill masks causally.
    decode: the build's decode kernel and how it takes the scale; None: none agrees with the reference.
    """

    prefix_is_causal: bool
    decode: DecodeVariant | None


class KunlunOperators(OperatorSet):
    """All but `sample`. Caches are [2, pages, page, g, d] as everywhere, in the kernels' order in memory."""

    constraints: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(_FLOAT_OPERATORS, DTYPES)
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

    def capabilities(self) -> list[OperatorCapability]:
        """With the kernels' limits."""
        return [replace(each, constraints=CONSTRAINTS.get(each.name, ())) for each in super().capabilities()]

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
