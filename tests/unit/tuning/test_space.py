"""What can be tried: values around the default that the load notices, in an order that covers the grid."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from meshkit.cli.tuning.space import DEFAULT, Axes, Setting, arrange, candidates, make_axis, neighbours

axes_of_any_size = st.builds(
    Axes,
    st.sampled_from([(None,), (64, None, 256), (None, 512), (32, 64, 128, None, 512)]),
    st.sampled_from([(None,), (4, None), (1, 2, None, 8)]),
    st.sampled_from([(None,), (None, 0.0, 0.02)]),
)


def test_values_are_multiples_of_the_default_in_ascending_order() -> None:
    assert make_axis(128) == (32, 64, None, 256, 512)


def test_no_value_is_larger_than_what_can_be_set() -> None:
    assert make_axis(128, most=200) == (32, 64, None, 200)
    assert make_axis(128, most=128) == (32, 64, None)


def test_values_that_the_load_cannot_tell_apart_are_tried_once() -> None:
    assert make_axis(4, enough=8) == (1, 2, None, 8), "8 clients never make a batch of 16"
    assert make_axis(64, enough=8) == (2, 4, None), "below the default only what 8 clients notice"
    assert make_axis(64, given=[16, 32, 128], enough=8) == (None,)


def test_given_values_stand_in_their_place_beside_the_default() -> None:
    assert make_axis(100, given=[300, 20, 100]) == (20, None, 300)


@given(
    st.integers(1, 10_000), st.lists(st.integers(1, 10_000), max_size=6),
    st.none() | st.integers(1, 10_000), st.none() | st.integers(1, 10_000),
)  # fmt: skip
def test_an_axis_is_ascending_holds_the_default_once_and_no_second_name_for_it(
    default: int, values: list[int], most: int | None, enough: int | None
) -> None:
    axis = make_axis(default, given=values, most=most, enough=enough)
    bounds = [bound for bound in (most, enough) if bound is not None]
    own = min([default, *bounds])
    placed = [own if value is None else value for value in axis]
    assert axis.count(None) == 1
    assert placed == sorted(set(placed))
    assert all(1 <= value <= min(bounds, default=value) for value in placed)


@given(axes_of_any_size)
def test_every_setting_is_a_candidate_once_and_the_default_is_none(axes: Axes) -> None:
    order = candidates(axes)
    chunks, batches, windows = axes.sizes
    assert len(order) == len(set(order)) == chunks * batches * windows - 1
    assert DEFAULT not in order
    assert sorted(arrange(order), key=str) == sorted(order, key=str)


def test_the_first_candidates_are_far_from_the_default_and_from_each_other() -> None:
    axes = Axes((32, 64, None, 256, 512), (4, 8, None, 32, 64))
    first = candidates(axes)[:4]
    corners = {Setting(chunk, batch) for chunk in (32, 512) for batch in (4, 64)}
    assert set(first) == corners


def test_neighbours_differ_in_one_value_by_one_step() -> None:
    axes = Axes((64, None, 256), (None, 16), (None, 0.0))
    assert set(neighbours(axes, DEFAULT)) == {
        Setting(64), Setting(256), Setting(None, 16), Setting(None, None, 0.0),
    }  # fmt: skip


def test_runs_are_arranged_by_window_and_the_largest_first() -> None:
    mixed = [Setting(64, None, 0.0), Setting(64, 8), Setting(256, 8), Setting(256, None, 0.0)]
    assert arrange(mixed) == [
        Setting(256, 8), Setting(64, 8), Setting(256, None, 0.0), Setting(64, None, 0.0),
    ]  # fmt: skip


def test_a_setting_says_what_it_changes() -> None:
    assert str(Setting(128, 16, 0.02)) == "chunk 128, 16 at once, window 20 ms"
    assert str(DEFAULT) == "the default"
