"""What can be tried: settings of a group as points of a grid, and an order that covers it early. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[int, int, int]

STEPS = (0.25, 0.5, 2.0, 4.0)
"""Values that are tried around the default where none are given, as multiples of it."""


@dataclass(frozen=True)
class Setting:
    """Changes to the settings as they were. None: as it was.

    chunked_prefill_size: tokens. max_running_requests: per replica. step_window_s: seconds.
    """

    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    step_window_s: float | None = None

    def __str__(self) -> str:
        parts = [
            f"chunk {self.chunked_prefill_size}" if self.chunked_prefill_size is not None else "",
            f"{self.max_running_requests} at once" if self.max_running_requests is not None else "",
            f"window {self.step_window_s * 1e3:g} ms" if self.step_window_s is not None else "",
        ]
        return ", ".join(part for part in parts if part) or "the default"


DEFAULT = Setting()


@dataclass(frozen=True)
class Axes:
    """Values of each setting in ascending order; None stands in the default's place."""

    chunked_prefill_size: tuple[int | None, ...] = (None,)
    max_running_requests: tuple[int | None, ...] = (None,)
    step_window_s: tuple[float | None, ...] = (None,)

    @property
    def default(self) -> Point:
        """Where the default is."""
        return (
            self.chunked_prefill_size.index(None),
            self.max_running_requests.index(None),
            self.step_window_s.index(None),
        )

    def setting(self, point: Point) -> Setting:
        """The setting at `point`."""
        chunk, batch, window = point
        return Setting(
            self.chunked_prefill_size[chunk], self.max_running_requests[batch], self.step_window_s[window]
        )

    def point(self, setting: Setting) -> Point:
        """Where `setting` is. Raises ValueError: it is not on the grid."""
        return (
            self.chunked_prefill_size.index(setting.chunked_prefill_size),
            self.max_running_requests.index(setting.max_running_requests),
            self.step_window_s.index(setting.step_window_s),
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of values of each setting."""
        return len(self.chunked_prefill_size), len(self.max_running_requests), len(self.step_window_s)


def make_axis(
    default: int, *, given: Sequence[int] = (), most: int | None = None, enough: int | None = None
) -> tuple[int | None, ...]:
    """Values of one setting around `default`.

    given: values to try; empty: multiples of the default. most: the largest that can be set. enough: beyond
    it the load notices no difference; what is larger is tried as `enough`, and not where the default is.
    """
    ceiling = min((bound for bound in (most, enough) if bound is not None), default=None)
    own = default if ceiling is None else min(default, ceiling)
    wanted = given or [int(own * step) for step in STEPS]
    values = {max(1, value if ceiling is None else min(value, ceiling)) for value in wanted}
    below = sorted(value for value in values if value < own)
    above = sorted(value for value in values if value > own)
    return (*below, None, *above)


def candidates(axes: Axes) -> list[Setting]:
    """All settings but the default, in an order of which every beginning covers the grid: each is the
    farthest from all before it, the default first.
    """
    sizes = axes.sizes
    left = list(itertools.product(range(sizes[0]), range(sizes[1]), range(sizes[2])))
    left.remove(axes.default)
    distance = {point: _distance(point, axes.default, sizes) for point in left}
    order: list[Setting] = []
    while distance:
        farthest = max(distance, key=lambda point: (distance[point], point))
        del distance[farthest]
        order.append(axes.setting(farthest))
        for point, nearest in distance.items():
            distance[point] = min(nearest, _distance(point, farthest, sizes))
    return order


def neighbours(axes: Axes, setting: Setting) -> list[Setting]:
    """Those one step away in one value."""
    at = axes.point(setting)
    found = []
    for axis, step in itertools.product(range(3), (-1, 1)):
        moved = list(at)
        moved[axis] += step
        if 0 <= moved[axis] < axes.sizes[axis]:
            found.append(axes.setting((moved[0], moved[1], moved[2])))
    return found


def arrange(settings: Sequence[Setting]) -> list[Setting]:
    """So that meshes are restarted seldom: by window, of which a mesh has one; the largest first, since a
    mesh that was started for them takes the others as well.
    """
    return sorted(
        settings,
        key=lambda each: (
            -1.0 if each.step_window_s is None else each.step_window_s,
            -(each.max_running_requests or 0),
            -(each.chunked_prefill_size or 0),
        ),
    )


def _distance(one: Sequence[int], other: Sequence[int], sizes: Sequence[int]) -> float:
    return math.dist(
        [place / max(1, size - 1) for place, size in zip(one, sizes, strict=True)],
        [place / max(1, size - 1) for place, size in zip(other, sizes, strict=True)],
    )
