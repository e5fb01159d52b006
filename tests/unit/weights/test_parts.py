"""A rank's weights: its rows, columns and experts of every tensor, and no more of a file than that."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder
from meshkit.modelstore.layouts import complete_config
from meshkit.modelstore.safetensors_index import read_safetensors_index
from meshkit.modelstore.sharding import ParallelLayout, RankPlace, TensorPart, rank_parts, rank_shapes
from worker_svc.weights import DummyWeights, ShapesOnly, WeightReader, WeightSource
from worker_svc.weights.parts import RankWeights, cut

CONFIG: dict[str, Any] = complete_config(
    {
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    source="the test",
)
TWO = ParallelLayout(tensor=2)


def places(layout: ParallelLayout) -> list[RankPlace]:
    return [layout.place(rank) for rank in range(layout.world_size)]


def together(sources: list[RankWeights], name: str, shape: tuple[int, ...], axis: int) -> Tensor:
    """The ranks' parts side by side, padding cut off."""
    return torch.cat([source.read(name) for source in sources], dim=axis).narrow(axis, 0, shape[axis])


def check_covers(config: Mapping[str, Any], source: WeightSource, layout: ParallelLayout) -> None:
    """Raise AssertionError unless the ranks have all of a model between them, each value once."""
    ranks = [RankWeights(source, config, place) for place in places(layout)]
    parts = [rank_parts(config, place) for place in places(layout)]
    for name in source.names():
        holders = [rank for rank, held in enumerate(parts) if name in held]
        assert holders, f"nobody has {name}"
        whole, part = source.read(name), parts[holders[0]][name]
        if part is None:
            assert all(torch.equal(ranks[rank].read(name), whole) for rank in holders), name
        else:
            shown = together([ranks[rank] for rank in holders], name, tuple(whole.shape), part.axis)
            assert torch.equal(shown, whole), name


def test_the_ranks_of_a_mixture_have_all_of_it_between_them() -> None:
    check_covers(CONFIG, DummyWeights(CONFIG), TWO)


def test_heads_fewer_than_ranks_are_held_by_neighbours() -> None:
    layout = ParallelLayout(tensor=4)
    name = "model.layers.0.self_attn.k_proj.weight"
    source = DummyWeights(CONFIG)
    held = [RankWeights(source, CONFIG, place).read(name) for place in places(layout)]
    assert torch.equal(held[0], held[1])
    assert torch.equal(held[2], held[3])
    assert torch.equal(torch.cat((held[0], held[2])), source.read(name))


def test_the_real_model_reads_the_same_in_parts(smollm2: ModelFolder) -> None:
    """Quantised blocks, rows in llama.cpp's rotary order, nine heads over three ranks."""
    assert smollm2.weights is not None
    reader = WeightReader(smollm2.weights)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "input_layernorm")
    for place in places(ParallelLayout(tensor=3))[1:]:
        rank = RankWeights(reader, smollm2.config, place)
        parts = rank_parts(smollm2.config, place)
        for name in rank.names():
            if name.startswith("model.layers.4.") and name.split(".")[-2] in names:
                part, whole = parts[name], reader.read(name)
                wanted = whole if part is None else cut(whole, part)
                assert torch.equal(rank.read(name), wanted), name
                assert rank.shape(name) == tuple(wanted.shape)


def test_a_stage_names_its_own_layers_by_their_numbers_in_the_model() -> None:
    first, last = (
        RankWeights(ShapesOnly(CONFIG), CONFIG, place).names() for place in places(ParallelLayout(pipeline=2))
    )
    assert {name.split(".")[2] for name in first if name.startswith("model.layers.")} == {"0", "1"}
    assert {name.split(".")[2] for name in last if name.startswith("model.layers.")} == {"2"}
    assert "model.embed_tokens.weight" in first
    assert not {"model.norm.weight", "lm_head.weight"} & set(first)
    assert {"model.norm.weight", "lm_head.weight"} <= set(last)


def test_shapes_are_known_without_values() -> None:
    for place in places(ParallelLayout(tensor=2, pipeline=2)):
        rank = RankWeights(ShapesOnly(CONFIG), CONFIG, place)
        shapes = rank_shapes(CONFIG, place)
        assert {name: tuple(rank.read(name).shape) for name in rank.names()} == shapes
        assert all(rank.read(name).is_meta for name in rank.names())


def test_rows_behind_the_vocabulary_are_zeros() -> None:
    last = RankWeights(DummyWeights(CONFIG), CONFIG, TWO.place(1)).read("lm_head.weight")
    assert last.shape == (49, 32)
    assert not last[-1].any()
    assert last[:-1].any(dim=1).all()


def test_a_model_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_attention_heads 4") as refusal:
        RankWeights(ShapesOnly(CONFIG), CONFIG, ParallelLayout(tensor=3).place(0))
    assert refusal.value.field == "tensor_parallel_size"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> WeightReader:
    """One matrix of 24 Mi numbers in bfloat16."""
    folder = tmp_path_factory.mktemp("wide")
    values = torch.arange(6144 * 4096).view(6144, 4096).to(torch.bfloat16)
    save_file({"w": values}, folder / "model.safetensors")
    index = read_safetensors_index(folder)
    assert index is not None
    return WeightReader(index)


def most_bytes(reader: WeightReader, part: TensorPart | None, trace: Path) -> int:
    """The most that torch held at any moment of a read in float32, as its own allocator tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        reader.read("w", torch.float32, part)
    watched.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted(
        (float(event["ts"]), int(event["args"]["Bytes"])) for event in events if event["name"] == "[memory]"
    )
    return max(itertools.accumulate(change for _, change in changes))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_ranks_read_never_holds_the_whole_tensor(wide: WeightReader, axis: int, tmp_path: Path) -> None:
    length = (6144, 4096)[axis] // 8
    part = TensorPart(axis, length, 2 * length)
    whole_bytes = 6144 * 4096 * 4
    part_bytes = whole_bytes // 8
    assert most_bytes(wide, None, tmp_path / "whole.json") >= whole_bytes, "the measurement sees nothing"
    most = most_bytes(wide, part, tmp_path / "part.json")
    # A chunk of rows is decoded at a time: 16 MiB in float32, and what its decoding needs beside.
    assert part_bytes <= most <= part_bytes + 40 * 2**20 < whole_bytes
    assert torch.equal(wide.read("w", torch.float32, part), cut(wide.read("w"), part))
