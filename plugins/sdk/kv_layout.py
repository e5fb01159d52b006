"""How a layer's KV cache lies in a chip's memory; operators index it in one order everywhere. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DIMENSIONS = ("kv", "page", "token", "head", "value")
"""Operators index a cache [2, pages, page size, heads, head size] by these, on every chip."""


@dataclass(frozen=True)
class KvLayout:
    """order: DIMENSIONS from the outermost to the innermost in memory.

    The framework allocates in this order and hands the operators a view in the order of DIMENSIONS; an
    operator that wants its own order back asks `in_memory`, which moves nothing.
    """

    order: tuple[str, ...] = DIMENSIONS

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(DIMENSIONS):
            raise ValueError(f"a KV layout orders {', '.join(DIMENSIONS)}; this one has {self.order}")

    @property
    def name(self) -> str:
        """As the capability report carries it: layers are outermost."""
        return "_".join(("layer", *self.order))

    def memory_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Sizes in memory of a cache of `shape` [2, pages, page size, heads, head size]."""
        return tuple(shape[DIMENSIONS.index(name)] for name in self.order)

    def as_cache(self, memory: Any) -> Any:
        """A tensor in memory order as operators index it: a view."""
        return memory.permute([self.order.index(name) for name in DIMENSIONS])

    def in_memory(self, cache: Any) -> Any:
        """The other way round: a view.

        Raises:
            ValueError: the cache lies in memory in another order.
        """
        memory = cache.permute([DIMENSIONS.index(name) for name in self.order])
        if not memory.is_contiguous():
            raise ValueError(
                f"kv_cache does not lie in memory in the order {self.name}; allocate it by memory_shape"
            )
        return memory

    def place(self, cache: Any) -> Any:
        """A cache with these values in this order: the same tensor where it lies so already, else a copy."""
        memory = cache.permute([DIMENSIONS.index(name) for name in self.order])
        return cache if memory.is_contiguous() else self.as_cache(memory.contiguous())
