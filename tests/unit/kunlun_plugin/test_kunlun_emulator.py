"""The emulator refuses what the chip would: each constraint of the vendor's interface is an error."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.kunlun_emulator.cuda import EmulatedCuda
from plugins.kunlun_emulator.limits import XpuError
from plugins.kunlun_emulator.process_group import new_process_group
from tests.unit.kunlun_plugin.emulated import RUNTIME, random

OPS = RUNTIME.ops
EMULATOR = Path(sys.modules["plugins.kunlun_emulator"].__path__[0])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that is right: 3 tokens after 15 in pages 2 and 0."""
    query, cache = random(1, 3, 4, 64), random(2, 2, 3, 2, 16, 64)
    given: dict[str, Any] = {
        "q": query,
        "k": cache[0],
        "v": cache[1],
        "out": torch.empty_like(query),
        "is_causal": True,
        "is_prefix_cache": True,
        "block_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "alpha": 1.0,
        "context_qlen_lod_cpu": int32(0, 3),
        "context_qlen_lod_xpu": int32(0, 3),
        "context_kvlen_lod_cpu": int32(0, 18),
        "context_kvlen_lod_xpu": int32(0, 18),
    }
    return {**given, **changes}


def as_dtype(dtype: torch.dtype) -> dict[str, Any]:
    given = prefill()
    return prefill(**{name: given[name].to(dtype) for name in ("q", "k", "v", "out")})


def sized(head_dim: int, block: int) -> dict[str, Any]:
    query, cache = random(1, 3, 4, head_dim), random(2, 2, 9, 2, block, head_dim)
    table = torch.arange(9, dtype=torch.int32).unsqueeze(0)
    return prefill(q=query, k=cache[0], v=cache[1], out=torch.empty_like(query), block_table=table)


SAME = int32(0, 18)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": (as_dtype(torch.float8_e4m3fn), "no fp8"),
    "fp64": (as_dtype(torch.float64), "fp64 is off"),
    "int8": (as_dtype(torch.int8), "fp32, fp16 and bf16"),
    "two dtypes": (prefill(q=random(1, 3, 4, 64).bfloat16()), "dtypes differ"),
    "query with gaps": (prefill(q=random(1, 3, 8, 64)[:, :4]), "q is not contiguous"),
    "heads inside blocks": (prefill(k=random(2, 3, 16, 2, 64).transpose(1, 2)), "k is not contiguous"),
    "head_dim 48": (sized(48, 16), "head_dim is 48"),
    "blocks of 32": (sized(64, 32), "block size is 32"),
    "int64 lengths": (prefill(context_qlen_lod_cpu=torch.tensor([0, 3])), "takes int32"),
    "lengths on the host only": (prefill(context_kvlen_lod_xpu=None), "on the host and on the device"),
    "one tensor for both sides": (
        prefill(context_kvlen_lod_cpu=SAME, context_kvlen_lod_xpu=SAME), "lies in the host's memory"),
    "sides that differ": (prefill(context_kvlen_lod_xpu=int32(0, 17)), "differs between host and device"),
    "lengths, not cumulative": (
        prefill(context_qlen_lod_cpu=int32(3, 3), context_qlen_lod_xpu=int32(3, 3)), "not cumulative"),
    "lengths that miss the rows": (
        prefill(context_qlen_lod_cpu=int32(0, 2), context_qlen_lod_xpu=int32(0, 2)), "ends at 2"),
    "no block table": (prefill(block_table=None), "wants block_table"),
    "int64 block table": (prefill(block_table=torch.tensor([[2, 0]])), "block_table is torch.int64"),
    "a block outside": (prefill(block_table=torch.tensor([[2, 3]], dtype=torch.int32)), "has 3 blocks"),
    "too few blocks": (prefill(block_table=torch.tensor([[2]], dtype=torch.int32)), "do not fit 1 blocks"),
    "heads that do not share": (
        prefill(q=random(1, 3, 3, 64), out=random(1, 3, 3, 64)), "3 heads do not share 2"),
}  # fmt: skip


def test_the_right_call_is_taken() -> None:
    OPS.prefill_attention(**prefill())
    for head_dim in (32, 64, 80, 96, 112, 120, 128, 192, 256):
        OPS.prefill_attention(**sized(head_dim, 128))


@pytest.mark.parametrize("case", REFUSED)
def test_prefill_refuses(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(XpuError, match=re.escape(message)):
        OPS.prefill_attention(**arguments)


def test_prefill_without_a_prefix_cuts_its_rows_by_the_lengths() -> None:
    q, k, v = random(1, 5, 4, 64), random(2, 5, 2, 64), random(3, 5, 2, 64)
    out, alone = torch.empty_like(q), torch.empty_like(q[2:])
    lod = {"context_qlen_lod_cpu": int32(0, 2, 5), "context_qlen_lod_xpu": int32(0, 2, 5)}
    OPS.prefill_attention(q=q, k=k, v=v, out=out, alpha=1.0, **lod)
    lod = {"context_qlen_lod_cpu": int32(0, 3), "context_qlen_lod_xpu": int32(0, 3)}
    OPS.prefill_attention(q=q[2:], k=k[2:], v=v[2:], out=alone, alpha=1.0, **lod)
    assert torch.equal(out[2:], alone)
    torch.testing.assert_close(out[0], v[0].repeat_interleave(2, dim=0))


def decode(**changes: Any) -> dict[str, Any]:
    cache = random(2, 2, 3, 2, 16, 64)
    given: dict[str, Any] = {
        "out": torch.empty(1, 2, 4, 64), "q": random(1, 1, 2, 4, 64),
        "k_cache": cache[0], "v_cache": cache[1],
        "context_lens_cpu": int32(18, 1), "context_lens_xpu": int32(18, 1), "batch_num": 2, "qlen": 1,
        "max_context_len": 18, "head_num": 4, "head_dim": 64, "scale": 0.125, "kv_head_num": 2,
        "block_size": 16, "max_num_blocks_per_seq": 2,
        "block_tables": torch.tensor([[2, 0], [1, 0]], dtype=torch.int32),
    }  # fmt: skip
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": random(1, 2, 4, 64)}, "q is [1, B, H, D]"),
        ({"kv_head_num": 16, "block_size": 2}, "16 heads, blocks of 2"),
        ({"context_lens_cpu": torch.tensor([18, 1])}, "takes int32"),
        ({"context_lens_cpu": int32(18, 0), "context_lens_xpu": int32(18, 0)}, "holds 0"),
        ({"block_tables": torch.tensor([[2, 0], [1, 0]])}, "block_tables is torch.int64"),
        ({"max_num_blocks_per_seq": 3}, "width"),
        ({"max_context_len": 17}, "max_context_len is 17"),
    ],
)
def test_decode_refuses(changes: dict[str, Any], message: str) -> None:
    OPS.speculative_attention(**decode())
    with pytest.raises(XpuError, match=re.escape(message)):
        OPS.speculative_attention(**decode(**changes))


def test_rotary_works_in_place_and_wants_a_table_of_the_same_dtype() -> None:
    q, k, positions = random(1, 3, 128), random(2, 3, 64), torch.tensor([0, 1, 5])
    table, before = random(3, 8, 64), q.clone()
    OPS.rotary_embedding(positions, q, k, 64, table, True)
    assert not torch.equal(q, before)
    with pytest.raises(XpuError, match="dtypes differ"):
        OPS.rotary_embedding(positions, q.bfloat16(), k.bfloat16(), 64, table, True)


def test_cache_writes_refuse_int64_slots_slots_outside_and_the_flash_variant() -> None:
    key, cache = random(1, 2, 2, 64), torch.zeros(2, 3, 2, 16, 64)
    with pytest.raises(XpuError, match=r"slot_mapping is torch\.int64"):
        OPS.reshape_and_cache(key, key, cache[0], cache[1], torch.tensor([0, 1]))
    with pytest.raises(XpuError, match="slot 48 lies outside"):
        OPS.reshape_and_cache(key, key, cache[0], cache[1], int32(0, 48))
    with pytest.raises(XpuError, match="more than one kv head"):
        OPS.reshape_and_cache_flash(key, key, cache[0], cache[1], int32(0, 1))


def test_norms_and_gate_refuse_gaps() -> None:
    wide = random(1, 4, 128)
    gaps, out, weight = wide[:, ::2], torch.empty(4, 64), torch.ones(64)
    with pytest.raises(XpuError, match="x is not contiguous"):
        OPS.rmsnorm(gaps, weight, out, 1e-5)
    with pytest.raises(XpuError, match="y is not contiguous"):
        OPS.add_rmsnorm(out, gaps, weight=weight, eps=1e-5, output=out, residual_output=out.clone())
    with pytest.raises(XpuError, match="not twice"):
        OPS.swiglu(wide, torch.empty(4, 32))


@pytest.mark.parametrize(
    ("module", "needs"), [("kunlun_ops", "xspeedgate_ops"), ("xspeedgate_ops", "cocopod")]
)
def test_modules_load_in_their_order_only(monkeypatch: pytest.MonkeyPatch, module: str, needs: str) -> None:
    for name in (module, needs):
        monkeypatch.delitem(sys.modules, f"plugins.kunlun_emulator.{name}")
    with pytest.raises(ImportError, match=f"import {needs} before"):
        importlib.import_module(f"plugins.kunlun_emulator.{module}")


def test_devices_are_the_visible_ones_up_to_the_first_that_is_not_there() -> None:
    assert EmulatedCuda({}).device_count() == 8
    assert EmulatedCuda({"XPU_VISIBLE_DEVICES": "6,7"}).device_count() == 2
    assert EmulatedCuda({"XPU_VISIBLE_DEVICES": "7,9,1"}).device_count() == 1
    assert not EmulatedCuda({"XPU_VISIBLE_DEVICES": ""}).is_available()
    with pytest.raises(XpuError, match="ordinal 1"):
        EmulatedCuda({"XPU_VISIBLE_DEVICES": "3"}).get_device_properties(1)


def test_collectives_have_one_name_and_it_is_not_intels() -> None:
    with pytest.raises(XpuError, match="xccl"):
        new_process_group(backend="xccl", store=None, rank=0, world_size=1, name="x", timeout=None)  # type: ignore[arg-type]


def test_the_emulator_shares_no_code_with_the_reference() -> None:
    sources = [path.read_text(encoding="utf-8") for path in EMULATOR.glob("*.py")]
    assert len(sources) >= 7
    assert not [text for text in sources if re.search(r"^\s*(from|import) .*reference", text, re.MULTILINE)]
