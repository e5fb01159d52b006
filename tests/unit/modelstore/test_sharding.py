"""Which part of a model each rank holds: every number is somewhere, and nothing large is anywhere twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from meshkit.errors import InvalidArgument
from meshkit.modelstore import SUPPORTED_ARCHITECTURES, tensor_shapes
from meshkit.modelstore.layouts import complete_config
from meshkit.modelstore.sharding import (
    ALONE,
    ParallelLayout,
    TensorPart,
    check_layout,
    local_sizes,
    rank_parts,
    rank_shapes,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 5,
    "vocab_size": 50,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "attention_bias": True,
}
LAYOUTS = [
    ParallelLayout(tensor, pipeline) for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (1, 3), (2, 5), (4, 2))
]


def complete(architecture: str = "LlamaForCausalLM", **fields: Any) -> dict[str, Any]:
    return complete_config({"architectures": [architecture], **SIZES, **fields}, source="test")


def times_held(config: dict[str, Any], layout: ParallelLayout) -> dict[str, npt.NDArray[np.int64]]:
    """How many ranks hold each number of each tensor of a model."""
    times = {name: np.zeros(shape, dtype=np.int64) for name, shape in tensor_shapes(config).items()}
    for rank in range(layout.world_size):
        for name, part in rank_parts(config, layout.place(rank)).items():
            moved = times[name] if part is None else np.moveaxis(times[name], part.axis, 0)
            moved[slice(None) if part is None else slice(part.start, part.stop)] += 1
    return times


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_the_ranks_together_hold_every_row_and_column_of_every_tensor(
    architecture: str, layout: ParallelLayout
) -> None:
    for name, times in times_held(complete(architecture), layout).items():
        assert times.min() > 0, name


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_products_are_split_and_only_small_things_and_shared_heads_are_held_twice(architecture: str) -> None:
    for name, times in times_held(complete(architecture), ParallelLayout(2, 1)).items():
        is_product = name.endswith(("_proj.weight", "_proj.bias")) or ".experts." in name
        is_split = is_product or "embed_tokens" in name or "lm_head" in name
        assert times.min() == times.max() == (1 if is_split else 2), name


def test_a_sum_over_ranks_gets_its_bias_once() -> None:
    parts = [rank_parts(complete(mlp_bias=True), ParallelLayout(2, 1).place(rank)) for rank in range(2)]
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        assert parts[0][f"model.layers.0.{name}"] is None
        assert f"model.layers.0.{name}" not in parts[1]
    assert parts[1]["model.layers.0.self_attn.q_proj.bias"] == TensorPart(0, 64, 128)


def test_heads_go_to_ranks_in_order_and_are_shared_where_ranks_outnumber_them() -> None:
    layout = ParallelLayout(8, 1)
    places = [layout.place(rank) for rank in range(8)]
    assert [list(place.kv_heads(2)) for place in places] == [[0]] * 4 + [[1]] * 4
    assert [list(place.heads(8)) for place in places] == [[rank] for rank in range(8)]
    keys = [rank_parts(complete(), place)["model.layers.0.self_attn.k_proj.weight"] for place in places]
    assert keys[3] == TensorPart(0, 0, 16)
    assert keys[4] == TensorPart(0, 16, 32)
    # A query head's key and value are on its own rank: heads 0 to 3 read head 0.
    for place in places:
        assert {head * 2 // 8 for head in place.heads(8)} <= set(place.kv_heads(2))


def test_the_vocabulary_is_padded_so_that_all_ranks_have_equally_many_rows() -> None:
    layout = ParallelLayout(4, 1)
    parts = [rank_parts(complete(), layout.place(rank))["model.embed_tokens.weight"] for rank in range(4)]
    assert parts == [
        TensorPart(0, 0, 13), TensorPart(0, 13, 26), TensorPart(0, 26, 39), TensorPart(0, 39, 50, padding=2),
    ]  # fmt: skip
    assert local_sizes(complete(), layout.place(3)).vocabulary == 13
    assert rank_shapes(complete(), layout.place(3))["lm_head.weight"] == (13, 64)


def test_a_rank_beyond_the_vocabulary_holds_zeros_alone() -> None:
    config = complete(vocab_size=5, num_attention_heads=8, num_key_value_heads=8)
    part = rank_parts(config, ParallelLayout(4, 1).place(3))["lm_head.weight"]
    assert part == TensorPart(0, 5, 5, padding=2)


def test_stages_have_their_layers_and_the_ends_their_tables() -> None:
    layout = ParallelLayout(1, 3)
    places = [layout.place(rank) for rank in range(3)]
    assert [list(place.layers(5)) for place in places] == [[0, 1], [2, 3], [4]]
    names = [set(rank_parts(complete(), place)) for place in places]
    assert [("model.embed_tokens.weight" in each, "lm_head.weight" in each) for each in names] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert "model.norm.weight" in names[2]
    assert "model.layers.4.mlp.up_proj.weight" in names[2]


def test_a_tied_head_is_read_from_the_embedding_at_both_ends() -> None:
    config = complete("Gemma2ForCausalLM")
    layout = ParallelLayout(1, 3)
    held = ["model.embed_tokens.weight" in rank_parts(config, layout.place(rank)) for rank in range(3)]
    assert held == [True, False, True]


def test_experts_are_whole_and_each_on_one_rank() -> None:
    config = complete("Qwen3MoeForCausalLM", num_experts=5)
    layout = ParallelLayout(2, 1)
    assert [list(layout.place(rank).experts(5)) for rank in range(2)] == [[0, 1, 2], [3, 4]]
    shapes = rank_shapes(config, layout.place(1))
    assert shapes["model.layers.0.mlp.experts.3.down_proj.weight"] == (64, 24)
    assert "model.layers.0.mlp.experts.2.down_proj.weight" not in shapes
    assert shapes["model.layers.0.mlp.gate.weight"] == (5, 64)


def test_ranks_are_numbered_stage_by_stage() -> None:
    layout = ParallelLayout(2, 3)
    assert [(layout.place(rank).stage, layout.place(rank).tensor_rank) for rank in range(6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert ALONE.is_first_stage
    assert ALONE.is_last_stage
    with pytest.raises(InvalidArgument, match="from 0 to 5"):
        layout.place(6)


def test_a_model_that_is_not_split_is_held_as_it_is() -> None:
    config = complete("Qwen2MoeForCausalLM")
    assert rank_shapes(config, ALONE) == tensor_shapes(config)
    assert set(rank_parts(config, ALONE).values()) == {None}


@pytest.mark.parametrize(
    ("fields", "layout", "field", "words"),
    [
        ({}, ParallelLayout(3, 1), "tensor_parallel_size", ["num_attention_heads 8", "smaller", "1, 2"]),
        (
            {"num_key_value_heads": 4},
            ParallelLayout(16, 1),
            "tensor_parallel_size",
            ["num_attention_heads 8"],
        ),
        ({"intermediate_size": 97}, ParallelLayout(2, 1), "tensor_parallel_size", ["intermediate_size 97"]),
        ({}, ParallelLayout(1, 6), "pipeline_parallel_size", ["6", "has 5"]),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            ParallelLayout(4, 1),
            "tensor_parallel_size",
            ["num_key_value_heads 6"],
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_by_field_and_numbers(
    fields: dict[str, Any], layout: ParallelLayout, field: str, words: list[str]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_layout(complete(**fields), layout)
    assert refused.value.field == field
    assert all(word in refused.value.message for word in words), refused.value.message


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="experts 3"):
        check_layout(
            complete("MixtralForCausalLM", num_local_experts=3, num_experts=None), ParallelLayout(4, 1)
        )


def test_experts_need_not_be_divided_where_no_layer_is_dense() -> None:
    check_layout(complete("Qwen3MoeForCausalLM", intermediate_size=97, num_experts=5), ParallelLayout(2, 1))


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_size_under_one_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        ParallelLayout(*sizes)
