"""The comparison at load catches mutations of what the plugin hands to the chip, and tells builds apart."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.kunlun import probes
from plugins.kunlun.decode import DecodeVariant, find_decode_variants
from plugins.kunlun.operators import KunlunOperators
from plugins.sdk.capabilities import Coverage
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.operators import REFERENCE
from plugins.sdk.planning import CallSite
from plugins.sdk.trials import TRIALS
from tests.unit.kunlun_plugin.emulated import RUNTIME, Call, changing, denied, operators_of, runtime_with

OPS = RUNTIME.ops


def _slots_off_by_one(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    OPS.reshape_and_cache(key, value, keys, values, slots + 1)


def _keys_and_values_exchanged(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> None:
    OPS.reshape_and_cache(key, value, values, keys, at)


def _blocks_exchanged_with_heads(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, at: Tensor
) -> None:
    blocks, heads, block, size = keys.shape
    flat = (cache.view(blocks * block, heads, size) for cache in (keys, values))
    for cache, rows in zip(flat, (key, value), strict=True):
        cache[at.long()] = rows


def _gate_exchanged_with_up(x: Tensor, y: Tensor) -> None:
    OPS.swiglu(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), y)


def _interleaved(positions: Tensor, q: Tensor, k: Tensor, size: int, table: Tensor, is_neox: bool) -> None:
    OPS.rotary_embedding(positions, q, k, size, table.roll(size // 2, dims=1), is_neox)


def _residual_forgotten(x: Tensor, y: Tensor, **rest: Any) -> None:
    OPS.add_rmsnorm(x, torch.zeros_like(y), **rest)


def one_less(lod: Tensor) -> Tensor:
    return lod - torch.tensor([0, 1], dtype=torch.int32)


def one_more(lod: Tensor) -> Tensor:
    return lod + torch.tensor([0, 1], dtype=torch.int32)


MUTATIONS: dict[str, tuple[str, str, Call]] = {
    "alpha without sqrt(d)": (
        "attention_prefill", "prefill_attention",
        changing("prefill_attention", alpha=lambda alpha: alpha / 8)),
    "alpha twice": (
        "attention_prefill", "prefill_attention",
        changing("prefill_attention", alpha=lambda alpha: 2 * alpha)),
    "query lengths short": (
        "attention_prefill", "prefill_attention",
        changing("prefill_attention", context_qlen_lod_cpu=one_less, context_qlen_lod_xpu=one_less)),
    "context lengths long": (
        "attention_prefill", "prefill_attention",
        changing("prefill_attention", context_kvlen_lod_cpu=one_more, context_kvlen_lod_xpu=one_more)),
    "lengths differ by side": (
        "attention_prefill", "prefill_attention",
        changing("prefill_attention", context_kvlen_lod_xpu=one_less)),
    "block table reversed": (
        "attention_prefill", "prefill_attention",
        changing("prefill_attention", block_table=lambda table: table.flip(1).contiguous())),
    "scale twice": (
        "attention_decode", "speculative_attention",
        changing("speculative_attention", scale=lambda scale: 2 * scale)),
    "decode lengths short": (
        "attention_decode", "speculative_attention",
        changing("speculative_attention", context_lens_cpu=lambda lens: lens - 1,
                 context_lens_xpu=lambda lens: lens - 1)),
    "slots off by one": ("write_kv", "reshape_and_cache", _slots_off_by_one),
    "keys and values exchanged": ("write_kv", "reshape_and_cache", _keys_and_values_exchanged),
    "layout swapped": ("write_kv", "reshape_and_cache", _blocks_exchanged_with_heads),
    "the flash variant": ("write_kv", "reshape_and_cache", OPS.reshape_and_cache_flash),
    "gate and up exchanged": ("silu_mul", "swiglu", _gate_exchanged_with_up),
    "sines and cosines exchanged": ("rotary", "rotary_embedding", _interleaved),
    "residual forgotten": ("add_rms_norm", "add_rmsnorm", _residual_forgotten),
}  # fmt: skip
"""What is wrong: (operator that has to be denied, the vendor's operator, how it is called)."""
GATED = {"silu_mul", "moe_experts", "moe_experts_w8a8"}
"""Operators that call swiglu."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_denied_by_name_and_nothing_else_is(mutation: str) -> None:
    operator, kernel, call = MUTATIONS[mutation]
    without = ("paged_attention",) if kernel == "speculative_attention" else ()
    operators = operators_of(runtime_with(without=without, **{kernel: call}))
    assert set(denied(operators)) == (GATED if kernel == "swiglu" else {operator})
    assert "compared with the reference at load" in denied(operators)[operator]


def test_a_denied_operator_runs_on_the_reference_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        operators = operators_of(runtime_with(reshape_and_cache=_slots_off_by_one))
    assert "operator is denied" in caplog.text
    assert "write_kv" in caplog.text
    sizes = {"G": 2, "D": 64}
    table = operators.choose([CallSite("write_kv", "layers.0", sizes)], dtype="float32", page_size=16)
    assert table.bind("write_kv", "layers.0", **sizes).call is REFERENCE["write_kv"]
    (decision,) = table.decisions
    assert decision.choice == "reference"
    assert decision.reason in caplog.text
    assert "off by" in decision.reason


def test_all_that_the_plugin_covers_is_tried() -> None:
    covered = {name for name in CATALOGUE if operators_of(RUNTIME).coverage(name) is Coverage.NATIVE}
    assert covered <= TRIALS.keys() | probes._OWN.keys()
    assert covered.isdisjoint({"sample", "qkv_rotary", "linear_w4a16", "moe_experts_w4a16"})


@pytest.mark.parametrize("page", [16, 64])
def test_a_fault_with_one_page_size_is_found(page: int) -> None:
    def wrong(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        OPS.reshape_and_cache(key, value, keys, values, slots + int(keys.shape[2] == page))

    assert set(denied(operators_of(runtime_with(reshape_and_cache=wrong)))) == {"write_kv"}


@pytest.mark.parametrize("experts", [7, 13])
def test_a_fault_with_one_number_of_experts_is_found(experts: int) -> None:
    def miscounted(topk_ids: Tensor, block_statistic: Tensor) -> None:
        OPS.gen_block_statistic(topk_ids, block_statistic)
        if block_statistic.shape[1] == experts:
            block_statistic.zero_()

    reasons = denied(operators_of(runtime_with(gen_block_statistic=miscounted)))
    assert set(reasons) == {"moe_experts", "moe_experts_w8a8"}


def test_rotary_that_works_on_its_inputs_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(
        self: KunlunOperators, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = [part.flatten(1).contiguous() for part in (query, key)]
        OPS.rotary_embedding(positions, *parts, query.shape[-1], cos_sin.to(query.dtype), True)
        return parts[0].view(query.shape), parts[1].view(key.shape)

    monkeypatch.setattr(KunlunOperators, "rotary", in_place)
    reasons = denied(operators_of(RUNTIME))
    assert set(reasons) == {"rotary"}
    assert "changed its input query" in reasons["rotary"]


def test_a_result_that_is_not_a_number_is_denied() -> None:
    def broken(x: Tensor, weight: Tensor, output: Tensor, eps: float) -> None:
        del weight, eps
        output.copy_(x * float("nan"))

    assert "off by nan" in denied(operators_of(runtime_with(rmsnorm=broken)))["rms_norm"]


def test_an_operator_that_the_build_lacks_is_denied() -> None:
    reasons = denied(operators_of(runtime_with(without=("swiglu",))))
    assert set(reasons) == GATED
    assert "AttributeError" in reasons["silu_mul"]


@pytest.mark.parametrize("flag", [True, False])
def test_the_flag_that_masks_causally_is_found_by_trial(flag: bool) -> None:
    build = changing("prefill_attention", is_causal=lambda given: given is flag)
    operators = operators_of(runtime_with(prefill_attention=build))
    assert denied(operators) == {}
    assert operators._findings.prefix_is_causal is flag


def _no_windows(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, context_lens_cpu: Tensor,
    context_lens_xpu: Tensor, batch_num: int, qlen: int, max_context_len: int, head_num: int, head_dim: int,
    scale: float, kv_head_num: int, block_size: int, max_num_blocks_per_seq: int, block_tables: Tensor,
) -> None:  # fmt: skip
    """The signature of an older build, whose 0.0 stands for 1 / sqrt(d)."""
    assert scale == 0.0
    OPS.speculative_attention(
        out, q, k_cache, v_cache, context_lens_cpu, context_lens_xpu, batch_num, qlen, max_context_len,
        head_num, head_dim, head_dim**-0.5, kv_head_num, block_size, max_num_blocks_per_seq,
        block_tables=block_tables,
    )  # fmt: skip


def test_builds_of_decode_attention_are_told_apart_by_their_parameters() -> None:
    explicit = operators_of(RUNTIME)
    assert explicit._findings.decode == DecodeVariant("speculative_attention", explicit_scale=True)
    implicit = operators_of(runtime_with(speculative_attention=_no_windows))
    assert implicit._findings.decode == DecodeVariant("speculative_attention", explicit_scale=False)
    oldest = operators_of(runtime_with(without=("speculative_attention",)))
    assert oldest._findings.decode == DecodeVariant("paged_attention", explicit_scale=False)
    assert denied(explicit) == denied(implicit) == denied(oldest) == {}


def test_a_build_without_decode_attention_decodes_on_the_reference() -> None:
    runtime = runtime_with(without=("speculative_attention", "paged_attention"))
    assert find_decode_variants(runtime.ops) == []
    operators = operators_of(runtime)
    assert set(denied(operators)) == {"attention_decode"}
    sizes = {"H": 6, "G": 2, "D": 64}
    table = operators.choose([CallSite("attention_decode", "layers.0", sizes)], dtype="float32", page_size=16)
    assert table.bind("attention_decode", "layers.0", **sizes).call is REFERENCE["attention_decode"]


def test_a_broken_newer_kernel_gives_way_to_the_older_one() -> None:
    broken = changing("speculative_attention", scale=lambda scale: 3 * scale)
    operators = operators_of(runtime_with(speculative_attention=broken))
    assert operators._findings.decode == DecodeVariant("paged_attention", explicit_scale=False)
    assert denied(operators) == {}
