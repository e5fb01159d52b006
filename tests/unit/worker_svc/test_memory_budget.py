"""Whether Qwen2.5-32B fits on modelled chips. The numbers are worked out by hand from its config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshkit.errors import InvalidArgument, ResourceExhausted
from meshkit.modelstore.layouts import complete_config
from meshkit.modelstore.sharding import ALONE, ParallelLayout
from worker_svc.kv_sizing import DeviceMemory, KvRequest
from worker_svc.memory_budget import Need, SetBudget, budget_rank, budget_set, in_gb
from worker_svc.memory_parts import ModelForm, StepSizes, activation_bytes

CONFIG_FILE = Path(__file__).parents[2] / "data" / "qwen2.5-32b" / "config.json"
GB = 10**9

# One layer: query, key, value, output; gate, up, down; and what every rank has of it: its two norms.
PRODUCTS = 5120 * 5120 + 2 * 1024 * 5120 + 5120 * 5120 + 3 * 27648 * 5120
BIASES = 5120 + 2 * 1024
NORMS = 2 * 5120
TABLE = 152064 * 5120
"""The embedding; the head is one more."""


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return complete_config(json.loads(CONFIG_FILE.read_text(encoding="utf-8")), source="qwen2.5-32b")


@pytest.fixture(scope="module")
def need(config: dict[str, Any]) -> Need:
    return Need(config, ModelForm("bfloat16", "bfloat16"), StepSizes(2048, 64), 16, KvRequest())


def chip(gigabytes: int) -> DeviceMemory:
    return DeviceMemory(gigabytes * GB, gigabytes * GB, shared_with_host=False)


def on(need: Need, tensor: int, pipeline: int, *gigabytes: int) -> SetBudget:
    return budget_set(need, ParallelLayout(tensor, pipeline), [chip(each) for each in gigabytes])


def test_one_chip_of_40_gb_is_refused_with_every_number_and_the_ways_out(need: Need) -> None:
    whole = 2 * (64 * (PRODUCTS + BIASES + NORMS) + 2 * TABLE + 5120)
    assert whole == 65_527_752_704
    with pytest.raises(ResourceExhausted) as refused:
        on(need, 1, 1, 40)
    error = refused.value
    assert error.field == "mem_fraction_static"
    assert error.reason == "MODEL_DOES_NOT_FIT"
    assert error.metadata["weight_bytes"] == str(whole)
    assert error.metadata["kv_bytes_per_token"] == str(2 * 64 * 8 * 128 * 2)
    for said in (
        "65.53 GB of weights", "262144 bytes of KV", "40.00 GB", "0.85 gives 34.00 GB",
        "tensor_parallel_size 2 x pipeline_parallel_size 1", "quantization w4a16",
    ):  # fmt: skip
        assert said in error.message, error.message
    # 8 bits are 34.0 GB: they would not leave room either, so they are not proposed.
    assert "w8a8" not in error.message


def test_two_chips_of_40_gb_hold_it_by_tensor_ranks(need: Need) -> None:
    budget = on(need, 2, 1, 40, 40)
    each = 2 * (64 * (PRODUCTS // 2 + BIASES // 2 + NORMS) + TABLE + 5120)
    assert each == 32_764_536_832
    assert [rank.weight_bytes for rank in budget.ranks] == [each, each]
    cell = 2 * 64 * 4 * 128 * 2
    assert [rank.kv_bytes_per_token for rank in budget.ranks] == [cell, cell]
    # 34 GB less weights over pages of 16 tokens.
    assert budget.page_count == (34 * GB - each) // (16 * cell) == 589
    assert budget.tokens == 9424
    assert budget.full_context_requests == 0
    assert budget.reserve_bytes(budget.ranks[0]) == 40 * GB - each - 9424 * cell


def test_four_chips_of_32_gb_hold_it_with_room_for_five_whole_contexts(need: Need) -> None:
    budget = on(need, 4, 1, 32, 32, 32, 32)
    each = 2 * (64 * (PRODUCTS // 4 + BIASES // 4 + NORMS) + TABLE // 2 + 5120)
    assert each == 16_382_928_896
    assert {rank.weight_bytes for rank in budget.ranks} == {each}
    assert budget.page_count == (272 * GB // 10 - each) // (16 * 65536) == 10315
    assert budget.full_context_requests == 10315 // (32768 // 16) == 5


def test_stages_split_layers_and_cells_and_the_ends_carry_the_tables(need: Need) -> None:
    budget = on(need, 1, 3, 32, 32, 32)
    layer = PRODUCTS + BIASES + NORMS
    assert [rank.weight_bytes for rank in budget.ranks] == [
        2 * (22 * layer + TABLE), 2 * 21 * layer, 2 * (21 * layer + TABLE + 5120),
    ]  # fmt: skip
    assert [rank.kv_bytes_per_token for rank in budget.ranks] == [22 * 4096, 21 * 4096, 21 * 4096]
    # The first stage has the least room, and all take as many pages as it can.
    assert budget.page_count == budget.ranks[0].page_count < budget.ranks[1].page_count


def test_of_unequal_chips_the_smallest_decides(need: Need) -> None:
    assert on(need, 2, 1, 40, 80).page_count == on(need, 2, 1, 40, 40).page_count
    with pytest.raises(ResourceExhausted, match="rank 1 of tensor_parallel_size 2"):
        on(need, 2, 1, 40, 32)


def test_activations_are_the_widest_tensors_of_a_layer(config: dict[str, Any]) -> None:
    # Two pairs of [rows, hidden], gate and up, and their product; behind them, the table of positions.
    rows = 2048 + 64
    layer = rows * (4 * 5120 + 3 * 27648) * 2
    tables = 32768 * 128 * 4
    assert activation_bytes(config, ALONE, "bfloat16", rows=rows, window=64) == layer + tables
    # With a window as wide as the step, drawing tokens is more: logits in bfloat16, then 33 bytes each.
    drawing = 512 * 5120 * 2 + 512 * 152064 * (2 + 33)
    assert activation_bytes(config, ALONE, "bfloat16", rows=512, window=512) == drawing + tables


def test_a_step_that_the_reserve_does_not_hold_is_refused(need: Need) -> None:
    large = replace(
        need, request=KvRequest(mem_fraction_static=0.99), steps=replace(need.steps, chunk_tokens=8192)
    )
    with pytest.raises(ResourceExhausted) as refused:
        budget_set(large, ParallelLayout(2, 1), [chip(40)] * 2)
    assert "0.99 gives 39.60 GB" in refused.value.message
    assert "chunked_prefill_size" in refused.value.message
    assert (
        budget_set(replace(large, request=KvRequest()), ParallelLayout(2, 1), [chip(40)] * 2).tokens == 9424
    )


def test_graphs_count_only_where_they_are_captured(need: Need) -> None:
    layout = ParallelLayout(4, 1)
    captured = replace(need, steps=replace(need.steps, captures_graphs=True))
    plain, graphs = (budget_rank(each, layout.place(0), chip(32)) for each in (need, captured))
    assert plain.graph_bytes == 0
    assert graphs.graph_bytes == activation_bytes(
        need.config, layout.place(0), "bfloat16", rows=64, window=64
    )


def test_what_is_free_is_counted_after_the_weights_are_there(need: Need) -> None:
    """As a worker does, which asks the chip when the load is over."""
    busy = DeviceMemory(40 * GB, 34 * GB, shared_with_host=False)
    rank = budget_rank(need, ParallelLayout(2, 1).place(0), busy)
    assert rank.page_count == int((34 * GB - rank.weight_bytes) * 0.9) // (16 * 131072)


def test_ranks_on_a_host_share_its_memory(need: Need) -> None:
    host = DeviceMemory(400 * GB, 400 * GB, shared_with_host=True)
    request = KvRequest(mem_fraction_static=0.5, executors_on_host=2)
    rank = budget_rank(replace(need, request=request), ParallelLayout(2, 1).place(0), host)
    assert rank.share_bytes == 200 * GB
    assert rank.page_count == (100 * GB - rank.weight_bytes) // (16 * 131072)


def test_max_total_tokens_goes_before_the_fraction_and_has_to_be_free(need: Need) -> None:
    request = KvRequest(max_total_tokens=8000)
    assert budget_set(replace(need, request=request), ParallelLayout(2, 1), [chip(40)] * 2).tokens == 8000
    with pytest.raises(ResourceExhausted, match="max_total_tokens 900000 takes"):
        budget_set(
            replace(need, request=KvRequest(max_total_tokens=900_000)), ParallelLayout(2, 1), [chip(40)] * 2
        )


def test_rounded_weights_are_codes_scales_and_zero_points(need: Need) -> None:
    four = replace(need, form=replace(need.form, quantization="w4a16"))
    rank = budget_rank(four, ALONE, chip(40))
    codes_and_scales = PRODUCTS // 2 + PRODUCTS // 128 * 5
    assert rank.weight_bytes == 64 * (codes_and_scales + 2 * (BIASES + NORMS)) + 2 * (2 * TABLE + 5120)


def test_where_nothing_would_do_that_is_said(need: Need) -> None:
    with pytest.raises(ResourceExhausted, match="Up to 64 such chips would not do"):
        budget_set(need, ALONE.layout, [DeviceMemory(GB // 4, GB // 4, shared_with_host=False)])


def test_what_is_proposed_does_fit(need: Need) -> None:
    for gigabytes in (8, 12, 24, 48):
        with pytest.raises(ResourceExhausted) as refused:
            on(need, 1, 1, gigabytes)
        words = refused.value.message.split("such chips: ")[1].replace(",", "").split()
        layout = ParallelLayout(int(words[1]), int(words[4]))
        assert budget_set(need, layout, [chip(gigabytes)] * layout.world_size).tokens > 0


def test_a_layout_that_does_not_divide_is_refused_before_memory_is_looked_at(need: Need) -> None:
    with pytest.raises(InvalidArgument, match="tensor_parallel_size is 3"):
        on(need, 3, 1, 1, 1, 1)


def test_sizes_are_said_in_gb_of_ten_to_the_nine() -> None:
    assert in_gb(65_527_752_704) == "65.53 GB"
