"""From flags to a grid: what the load and the mesh can tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.tuning.plot import lines_of, widest_axis
from meshkit.cli.tuning.request import Tried, make_axes
from meshkit.cli.tuning.space import Axes
from meshkit.cli.tuning.taken_group import Ceilings, TakenGroup
from meshkit.load.settings import BenchSettings

CHOOSE = Tried(None, None, None)


def grid(tried: Tried = CHOOSE, *, can_grow: bool = True, has_windows: bool = False, **load: Any) -> Axes:
    """Of a group with chunks of 128 and 16 at once."""
    group = TakenGroup("127.0.0.1:1", "g")
    group.effective = group.capacity = Ceilings(128, 16)
    settings = BenchSettings(gateway="g", **load)
    return make_axes(tried, settings, group, can_grow=can_grow, has_windows=has_windows)


def test_a_closed_loop_bounds_batch_and_chunk() -> None:
    axes = grid(max_concurrency=24, random_input_len=10)
    assert axes.max_running_requests == (4, 8, None, 24)
    assert axes.chunked_prefill_size == (32, 64, None, 240)


def test_a_shared_prefix_is_part_of_the_prompt() -> None:
    axes = grid(max_concurrency=1, dataset_name="shared-prefix", shared_prefix_len=200, random_input_len=10)
    assert axes.chunked_prefill_size == (32, 64, None, 210)
    assert axes.max_running_requests == (None,)


def test_a_trace_or_an_open_loop_bounds_nothing_by_itself() -> None:
    unbounded = (4, 8, None, 32, 64)
    assert grid(request_rate=1.0).max_running_requests == unbounded
    trace = grid(dataset_name="trace", dataset_path=Path("t.jsonl"))
    assert (trace.max_running_requests, trace.chunked_prefill_size) == (unbounded, (32, 64, None, 256, 512))
    assert grid(request_rate=1.0, max_concurrency=20).max_running_requests == (4, 8, None, 20)


def test_a_running_group_gets_no_more_than_its_replicas_take() -> None:
    axes = grid(can_grow=False, max_concurrency=100)
    assert axes == Axes((32, 64, None), (4, 8, None), (None,))


def test_values_may_be_given_or_ruled_out() -> None:
    axes = grid(Tried((100,), (), (0.03, 0.0)), has_windows=True, max_concurrency=64)
    assert axes == Axes((100, None), (None,), (None, 0.0, 0.03))


def test_windows_are_tried_where_a_mesh_can_be_started_with_another_one() -> None:
    assert grid(has_windows=True).step_window_s == (None, 0.0, 0.02, 0.05)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    def row(chunk: int | None, batch: int | None, share: float | None) -> dict[str, Any]:
        return {
            "chunked_prefill_size": chunk, "max_running_requests": batch, "step_window_s": None,
            "of_default": share,
        }  # fmt: skip

    return [row(256, 8, 1.2), row(None, None, 1.0), row(64, None, 0.9), row(512, 8, None), row(64, 8, 0.8)]


def test_a_plot_has_a_line_for_what_the_other_settings_are(rows: list[dict[str, Any]]) -> None:
    axis = widest_axis(rows)
    assert axis == "chunked_prefill_size"
    assert lines_of(rows, axis, default={axis: 128.0}) == {
        "max_running_requests 8": [(64, 0.8), (256, 1.2)],
        "others as they were": [(64, 0.9), (128.0, 1.0)],
    }
