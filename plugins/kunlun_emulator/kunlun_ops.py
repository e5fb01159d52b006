"""Stand-in for `kunlun_ops`: the operators that the plugin uses, with the vendor's signatures and limits."""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from torch import Tensor

from plugins.kunlun_emulator.attention import attend, gather
from plugins.kunlun_emulator.limits import (
    check_both_sides,
    check_cache,
    check_float,
    check_head_dim,
    check_heads,
    check_int32,
    check_lod,
    require,
)
from plugins.kunlun_emulator.moe import (
    gen_block_statistic,
    moe_fc,
    moe_post,
    moe_pre_sorted,
    moe_softmax_topk_norm,
)
from plugins.kunlun_emulator.quantised import gemm_I8_I8_bf16_nt, matmul, quant2d

__all__ = [
    "add_rmsnorm",
    "gemm_I8_I8_bf16_nt",
    "gen_block_statistic",
    "matmul",
    "moe_fc",
    "moe_post",
    "moe_pre_sorted",
    "moe_softmax_topk_norm",
    "paged_attention",
    "prefill_attention",
    "quant2d",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rmsnorm",
    "rotary_embedding",
    "speculative_attention",
    "swiglu",
]
__version__ = "0.1.205+emulated"

if "plugins.kunlun_emulator.xspeedgate_ops" not in sys.modules:
    raise ImportError("undefined symbol: import xspeedgate_ops before kunlun_ops", name=__name__)


def rmsnorm(x: Tensor, weight: Tensor, output: Tensor, eps: float) -> None:
    """output = x normalised by its root mean square, times weight; rows are the last dimension."""
    check_float("rmsnorm", x=x, weight=weight, output=output)
    require(output.shape == x.shape, "rmsnorm: output has another shape than x")
    output.copy_(_normalised(x.float(), weight, eps))


def add_rmsnorm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, output: Tensor, residual_output: Tensor
) -> None:
    """residual_output = x + y; output = rmsnorm of that sum, which the kernel keeps in float32."""
    check_float("add_rmsnorm", x=x, y=y, weight=weight, output=output, residual_output=residual_output)
    require(x.shape == y.shape == output.shape == residual_output.shape, "add_rmsnorm: shapes differ")
    total = x.float() + y.float()
    residual_output.copy_(total)
    output.copy_(_normalised(total, weight, eps))


def swiglu(x: Tensor, y: Tensor) -> None:
    """y [t, i] = silu of the first half of x [t, 2i], times the second."""
    check_float("swiglu", x=x, y=y)
    require(x.shape[-1] == 2 * y.shape[-1], f"swiglu: x {list(x.shape)} is not twice y {list(y.shape)}")
    gate, up = x[..., : y.shape[-1]].float(), x[..., y.shape[-1] :].float()
    y.copy_(gate / (1 + (-gate).exp()) * up)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotates q [t, h * head_size] and k [t, g * head_size] IN PLACE; cosines, then sines in a row."""
    check_float("rotary_embedding", q=q, k=k, cos_sin_cache=cos_sin_cache)
    require(q.dim() == 2 and k.dim() == 2, "rotary_embedding: q and k are [tokens, heads * head_size]")
    require(cos_sin_cache.shape[1] == head_size, "rotary_embedding: cos_sin_cache is [positions, head_size]")
    require(is_neox, "rotary_embedding: only halves (neox) are emulated")
    require(
        positions.dtype in (torch.int32, torch.int64) and positions.shape == (q.shape[0],),
        "rotary_embedding: positions are integers, one a token",
    )
    row = cos_sin_cache.index_select(0, positions.long()).float()[:, None, :]
    half = head_size // 2
    for tensor in (q, k):
        heads = tensor.view(tensor.shape[0], -1, head_size)
        wide = heads.float()
        turned = torch.roll(wide, half, dims=-1)
        turned[..., :half].neg_()
        heads.copy_(wide * row[..., :half].repeat(1, 1, 2) + turned * row[..., half:].repeat(1, 1, 2))


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Rows [t, g, d] to slots (block * block size + offset) of caches [blocks, g, block, d]."""
    check_float("reshape_and_cache", key=key, value=value, key_cache=key_cache)
    check_cache("reshape_and_cache", key_cache, value_cache)
    check_int32("reshape_and_cache", slot_mapping=slot_mapping)
    blocks, heads, block, size = key_cache.shape
    require(
        key.shape == value.shape == (slot_mapping.numel(), heads, size),
        f"reshape_and_cache: key is {list(key.shape)}; the cache is {list(key_cache.shape)}",
    )
    for row, slot in enumerate(slot_mapping.tolist()):
        require(
            0 <= slot < blocks * block,
            f"reshape_and_cache: slot {slot} lies outside {blocks} blocks of {block}",
        )
        key_cache[slot // block, :, slot % block].copy_(key[row])
        value_cache[slot // block, :, slot % block].copy_(value[row])


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The chip's variant is wrong for more than one key/value head; here that is an error."""
    require(key.shape[1] == 1, "reshape_and_cache_flash: wrong for more than one kv head")
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def prefill_attention(  # noqa: PLR0913, PLR0917 - the vendor's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    is_causal: bool = True,
    is_prefix_cache: bool = False,
    block_table: Tensor | None = None,
    alpha: float = 1.0,
    context_qlen_lod_cpu: Tensor | None = None,
    context_qlen_lod_xpu: Tensor | None = None,
    context_kvlen_lod_cpu: Tensor | None = None,
    context_kvlen_lod_xpu: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_lse: Tensor | None = None,
    swa_left: int = -1,
    swa_right: int = -1,
    sink: Tensor | None = None,
) -> None:
    """out [t, h, d] for sequences that `context_qlen_lod` cuts q into; scores are times alpha / sqrt(d).

    Without a prefix k and v are [t, g, d]; with one they are the whole caches, read by `block_table`.
    """
    name = "prefill_attention"
    unused = alibi_slopes is None and softmax_lse is None and sink is None and swa_left == swa_right == -1
    require(unused, f"{name}: slopes, windows, sinks and log-sums are not emulated")
    check_float(name, q=q, k=k, v=v, out=out)
    check_head_dim(name, q.shape[-1])
    queries = check_lod(name, "context_qlen_lod", context_qlen_lod_cpu, context_qlen_lod_xpu)
    ends, rows = queries[-1], q.shape[0]
    require(ends == rows, f"{name}: context_qlen_lod ends at {ends}; q has {rows} rows")
    check_heads(name, q.shape[1], k.shape[1])
    scale = alpha / q.shape[-1] ** 0.5
    if not is_prefix_cache:
        require(k.shape == v.shape and k.shape[0] == q.shape[0], f"{name}: k and v are [tokens, kv heads, d]")
        for first, last in pairwise(queries):
            part = (part[first:last].transpose(0, 1) for part in (k, v))
            out[first:last] = attend(q[first:last], *part, scale=scale, causal=is_causal)
        return
    check_cache(name, k, v)
    lengths = check_lod(name, "context_kvlen_lod", context_kvlen_lod_cpu, context_kvlen_lod_xpu)
    if block_table is None:
        require(False, f"{name}: the prefix path wants block_table")
        return
    check_int32(name, block_table=block_table)
    require(
        len(lengths) == len(queries) == block_table.shape[0] + 1,
        f"{name}: lengths of {len(queries) - 1} queries and {len(lengths) - 1} contexts, "
        f"{block_table.shape[0]} block tables",
    )
    for row, (first, last) in enumerate(pairwise(queries)):
        held = lengths[row + 1] - lengths[row]
        require(held >= last - first, f"{name}: {held} keys for {last - first} queries")
        part = (gather(name, cache, block_table[row], held) for cache in (k, v))
        out[first:last] = attend(q[first:last], *part, scale=scale, causal=is_causal)


def speculative_attention(  # noqa: PLR0913, PLR0917 - the vendor's signature
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens_cpu: Tensor,
    context_lens_xpu: Tensor,
    batch_num: int,
    qlen: int,
    max_context_len: int,
    head_num: int,
    head_dim: int,
    scale: float,
    kv_head_num: int,
    block_size: int,
    max_num_blocks_per_seq: int,
    max_window_size: int = -1,
    block_tables: Tensor | None = None,
    sink: Tensor | None = None,
) -> None:
    """out and q [1, b, h, d]: one token of each sequence over its blocks; every size is said once more."""
    name = "speculative_attention"
    require(sink is None and max_window_size == -1 and qlen == 1, f"{name}: only plain decode is emulated")
    require(q.dim() == 4 and q.shape == (1, batch_num, head_num, head_dim), f"{name}: q is [1, B, H, D]")
    check_cache(name, k_cache, v_cache)
    require(
        k_cache.shape[1:] == (kv_head_num, block_size, head_dim),
        f"{name}: caches are {list(k_cache.shape)}; said are {kv_head_num} heads, blocks of {block_size}",
    )
    if block_tables is None:
        require(False, f"{name}: block_tables are wanted")
        return
    require(block_tables.shape == (batch_num, max_num_blocks_per_seq), f"{name}: block_tables' width differs")
    _decode(name, q[0], k_cache, v_cache, block_tables, context_lens_cpu, context_lens_xpu, out[0], scale)
    require(int(context_lens_cpu.max()) <= max_context_len, f"{name}: max_context_len is {max_context_len}")


def paged_attention(
    x: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens_cpu: Tensor,
    context_lens_xpu: Tensor,
    is_context: bool,
    is_causal: bool,
    out: Tensor,
    vo_head_dim: int,
) -> None:
    """Decode of older builds: x and out [b, h, d], scores times 1 / sqrt(d), which cannot be changed."""
    name = "paged_attention"
    require(not is_context and is_causal, f"{name}: only decode is emulated")
    require(x.dim() == 3 and vo_head_dim == x.shape[2], f"{name}: x is [B, H, D] and vo_head_dim is D")
    scale = x.shape[2] ** -0.5
    _decode(name, x, k_cache, v_cache, block_tables, context_lens_cpu, context_lens_xpu, out, scale)


def _decode(
    name: str,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    lens_cpu: Tensor,
    lens_xpu: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    check_float(name, q=query, k_cache=k_cache, v_cache=v_cache, out=out)
    check_cache(name, k_cache, v_cache)
    check_heads(name, query.shape[1], k_cache.shape[1])
    check_int32(name, block_tables=block_tables)
    lengths = check_both_sides(name, "context_lens", lens_cpu, lens_xpu).tolist()
    require(len(lengths) == query.shape[0] == block_tables.shape[0], f"{name}: batch sizes differ")
    for row, length in enumerate(lengths):
        require(length > 0, f"{name}: context_lens holds {length}")
        part = (gather(name, cache, block_tables[row], length) for cache in (k_cache, v_cache))
        out[row] = attend(query[row : row + 1], *part, scale=scale, causal=False)[0]


def _normalised(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = torch.linalg.vecdot(wide, wide).unsqueeze(-1) / wide.shape[-1]
    normalised: Tensor = wide / (mean_square + eps).sqrt() * weight.float()
    return normalised
