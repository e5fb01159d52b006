"""Which layout chips get: tensor ranks inside a machine, stages across, and more stages over slow links."""

from __future__ import annotations

from typing import Any

import pytest

from chipmesh.device.v1alpha1.device_pb2 import DeviceProperties as DeviceMessage
from meshkit.errors import InvalidArgument, ResourceExhausted
from meshkit.modelstore.layouts import complete_config
from meshkit.modelstore.sharding import ParallelLayout
from plugins.sdk.capabilities import CapabilityReport, LinkCapability
from plugins.sdk.device import DeviceProperties
from worker_svc.layout import ChipFacts, choose_layout, layouts_of, least_bandwidth, read_chip

GB = 10**9


def model(**fields: Any) -> dict[str, Any]:
    """Sizes of Qwen2.5-32B unless told otherwise."""
    document = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "num_hidden_layers": 64,
        "vocab_size": 152064,
    }
    return complete_config({**document, **fields}, source="test")


def host(
    count: int, *, first: int = 0, memory: int = 40, links: dict[int, int] | None = None
) -> list[ChipFacts]:
    return [
        ChipFacts(memory * GB, memory * GB, first + index, "a", ("bfloat16",), links or {})
        for index in range(count)
    ]


def sizes(layout: ParallelLayout) -> tuple[int, int]:
    return layout.tensor, layout.pipeline


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1], (1, 1)),
        ([2], (2, 1)),
        ([8], (8, 1)),
        # 3 tensor ranks would not divide 40 heads, nor would 6.
        ([3], (1, 3)),
        ([6], (2, 3)),
        ([4, 4], (4, 2)),
        ([1, 1], (1, 2)),
        # Stages of two: the most that both machines divide into.
        ([4, 2], (2, 3)),
        ([3, 2], (1, 5)),
    ],
)
def test_tensor_ranks_stay_inside_a_machine_and_stages_cross_machines(
    counts: list[int], expected: tuple[int, int]
) -> None:
    hosts = [host(count, first=100 * number) for number, count in enumerate(counts)]
    layout, reason = choose_layout(model(), hosts)
    assert sizes(layout) == expected
    assert reason


def test_the_reason_says_one_chip_and_several_machines() -> None:
    assert choose_layout(model(), [host(1)])[1] == "one chip"
    assert "2 machines" in choose_layout(model(), [host(2), host(2)])[1]


def test_unequal_memory_is_said_with_the_smallest_chip() -> None:
    _, reason = choose_layout(model(), [[*host(1), *host(1, first=1, memory=32)]])
    assert "smallest chip, 32.00 of up to 40.00 GB" in reason


def test_the_bound_of_links_is_the_one_of_its_formula() -> None:
    """Two sums of [t, 5120] in 2 bytes against 2 t P operations; P: a layer's products, biases and norms."""
    weights = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 27648 * 5120 + 5120 + 2 * 1024 + 2 * 5120
    assert least_bandwidth(model(), "bfloat16") == int(2 * 5120 * 2 * 1e14 / weights) == 4_200_118_863
    assert least_bandwidth(model(), "float32") == int(2 * 5120 * 4 * 1e14 / weights)


def test_of_experts_only_those_count_that_a_token_meets() -> None:
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    mixture = model(architectures=["Qwen3MoeForCausalLM"], head_dim=128, **fields)
    attention = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 2 * 128 + 2 * 5120
    met = attention + 8 * 5120 + 2 * 3 * 1024 * 5120
    assert least_bandwidth(mixture, "bfloat16") == int(2 * 5120 * 2 * 1e14 / met)


def linked(count: int, speeds: dict[tuple[int, int], int]) -> list[ChipFacts]:
    """Chips of one machine, links by their ends; GB/s times 10."""
    return [
        ChipFacts(
            device=index,
            compute_dtypes=("bfloat16",),
            links={
                peer: speed * GB // 10
                for ends, speed in speeds.items()
                for peer in ends
                if index in ends and peer != index
            },
        )
        for index in range(count)
    ]


def test_a_link_under_the_bound_prefers_stages_and_one_over_it_tensor_ranks() -> None:
    slow, reason = choose_layout(model(), [linked(2, {(0, 1): 41})])
    assert sizes(slow) == (1, 2)
    assert "4.1 GB/s" in reason
    assert "4.2 GB/s" in reason
    assert sizes(choose_layout(model(), [linked(2, {(0, 1): 43})])[0]) == (2, 1)


def test_unknown_links_are_taken_for_good_ones() -> None:
    assert sizes(choose_layout(model(), [linked(4, {(0, 1): 0})])[0]) == (4, 1)


def test_pairs_with_fast_links_become_tensor_groups_and_slow_links_lie_between_stages() -> None:
    fast, slow = 2000, 10
    speeds = {(0, 1): fast, (2, 3): fast, (0, 2): slow, (0, 3): slow, (1, 2): slow, (1, 3): slow}
    assert sizes(choose_layout(model(), [linked(4, speeds)])[0]) == (2, 2)


def test_slow_links_are_used_where_there_are_too_few_layers_for_stages() -> None:
    layout, reason = choose_layout(model(num_hidden_layers=1), [linked(2, {(0, 1): 1})])
    assert sizes(layout) == (2, 1)
    assert "too few layers" in reason


def test_a_layout_that_does_not_fit_gives_way_to_the_next() -> None:
    def fits(layout: ParallelLayout) -> None:
        if layout.tensor > 2:
            raise ResourceExhausted("too large")

    layout, reason = choose_layout(model(), [host(8)], fits=fits)
    assert sizes(layout) == (2, 4)
    assert reason == "tensor_parallel_size 8 x pipeline_parallel_size 1 would not fit"


def test_where_none_fits_the_first_ones_refusal_is_told() -> None:
    def fits(layout: ParallelLayout) -> None:
        raise ResourceExhausted(f"too large for {layout.tensor}")

    with pytest.raises(ResourceExhausted, match="too large for 8"):
        choose_layout(model(), [host(8)], fits=fits)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"tensor": 4}, (4, 2)),
        ({"pipeline": 4}, (2, 4)),
        ({"tensor": 2, "pipeline": 4}, (2, 4)),
        ({"pipeline": 8}, (1, 8)),
    ],
)
def test_sizes_that_were_asked_for_are_taken(asked: dict[str, int], expected: tuple[int, int]) -> None:
    layout, reason = choose_layout(
        model(), [host(8)], tensor=asked.get("tensor"), pipeline=asked.get("pipeline")
    )
    assert sizes(layout) == expected
    assert reason == "as asked"


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"tensor": 3}, "tensor_parallel_size", ["has 8 chips"]),
        ({"tensor": 2, "pipeline": 2}, "tensor_parallel_size", ["4 ranks", "8 chips"]),
        ({"pipeline": 16}, "pipeline_parallel_size", ["16 ranks", "8 chips"]),
        ({"tensor": 0}, "tensor_parallel_size", ["at least 1"]),
    ],
)
def test_sizes_that_do_not_make_up_the_chips_are_refused(
    asked: dict[str, int], field: str, words: list[str]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        choose_layout(model(), [host(8)], tensor=asked.get("tensor"), pipeline=asked.get("pipeline"))
    assert refused.value.field == field
    assert all(word in refused.value.message for word in words), refused.value.message


def test_sizes_asked_for_that_do_not_divide_the_model_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_attention_heads 40"):
        choose_layout(model(), [host(3)], tensor=3)


def test_chips_that_no_layout_divides_are_refused_with_the_models_numbers() -> None:
    with pytest.raises(InvalidArgument) as refused:
        choose_layout(model(num_hidden_layers=2), [host(3)])
    assert refused.value.field == "device_groups"
    assert all(word in refused.value.message for word in ("over 3 chips", "40 heads", "2 layers"))


def test_layouts_come_with_most_tensor_ranks_first() -> None:
    assert [sizes(layout) for layout in layouts_of(model(), 8)] == [(8, 1), (4, 2), (2, 4), (1, 8)]


def test_facts_are_read_alike_from_the_sdks_classes_and_from_messages() -> None:
    report = CapabilityReport(
        chip="a", compute_dtypes=("bfloat16", "float32"), links=(LinkCapability(1, 25 * GB),)
    )
    properties = DeviceProperties(3, "A chip", 40 * GB, 39 * GB, 8)
    facts = read_chip(report, properties)
    assert facts == ChipFacts(40 * GB, 39 * GB, 3, "a", ("bfloat16", "float32"), {1: 25 * GB})
    message: DeviceMessage = properties.to_proto()
    assert read_chip(report.to_proto(), message) == facts
