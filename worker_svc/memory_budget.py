"""Whether a model fits on a set of chips, and how many tokens beside it; what would fit where it does not.

Pure: a completed configuration and sizes in, bytes out. No clock, no file, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshkit.errors import ResourceExhausted
from meshkit.modelstore.sharding import ALONE, ParallelLayout, RankPlace
from worker_svc.kv_sizing import DeviceMemory, KvRequest, memory_share, size_kv_cache, static_fraction
from worker_svc.layout import describe_layout, layouts_of
from worker_svc.memory_parts import (
    ROUNDED,
    ModelForm,
    StepSizes,
    activation_bytes,
    kv_bytes_per_token,
    weight_bytes,
)

_PROPOSED_CHIPS = (*range(2, 9), *range(16, 65, 8))
"""Numbers of chips that are proposed: as a machine has them, then whole machines of eight."""


@dataclass(frozen=True)
class Need:
    """A model with everything that its budget hangs on but layout and chips.

    config: completed. program_bytes: weights as a step program holds them, where one serves a model that is
    not split; None: by operators.
    """

    config: Mapping[str, Any]
    form: ModelForm
    steps: StepSizes
    page_size: int
    request: KvRequest
    program_bytes: int | None = None

    @cached_property
    def context_tokens(self) -> int:
        """The longest sequence."""
        return int(self.config["max_position_embeddings"])


@dataclass(frozen=True)
class RankBudget:
    """One rank's memory, in bytes. share: of its chip's memory, what is one executor's. activations: of the
    largest step, and the tables of positions. page_count: pages that it has room for by `rule`.
    """

    place: RankPlace
    share_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    graph_bytes: int
    page_count: int = 0
    rule: str = ""


@dataclass(frozen=True)
class SetBudget:
    """All ranks of one replica."""

    need: Need
    layout: ParallelLayout
    ranks: Sequence[RankBudget]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.need.page_size

    @property
    def page_count(self) -> int:
        """Pages that every rank has room for, so what each of them allocates."""
        return min(each.page_count for each in self.ranks)

    @property
    def tokens(self) -> int:
        """Tokens of the KV cache."""
        return self.page_count * self.page_size

    @property
    def full_context_requests(self) -> int:
        """Requests of the longest context that fit at once."""
        return self.page_count // -(-self.need.context_tokens // self.page_size)

    def reserve_bytes(self, rank: RankBudget) -> int:
        """What weights and KV cache leave of the rank's share: for activations, graphs and the runtime."""
        return rank.share_bytes - rank.weight_bytes - self.tokens * rank.kv_bytes_per_token


def in_gb(nbytes: int) -> str:
    """Bytes in GB of 10^9, as chips' memories are sold."""
    return f"{nbytes / 1e9:.2f} GB"


def budget_rank(need: Need, place: RankPlace, memory: DeviceMemory) -> RankBudget:
    """One rank on one chip, its KV cache sized by the rules of worker_svc.kv_sizing.

    Raises:
        ResourceExhausted: (max_total_tokens, mem_fraction_static) fewer than 2 pages fit, or no step does.
    """
    rank = _parts_of(need, place, memory)
    # A load asks the chip what is free when the weights are there already.
    left = replace(memory, free_bytes=max(memory.free_bytes - rank.weight_bytes, 0))
    size = size_kv_cache(
        need.request,
        left,
        page_size=need.page_size,
        kv_bytes_per_token=rank.kv_bytes_per_token,
        weight_bytes=rank.weight_bytes,
    )
    sized = replace(rank, page_count=size.page_count, rule=size.rule)
    _check_step(sized, need.page_size)
    return sized


def budget_set(need: Need, layout: ParallelLayout, memories: Sequence[DeviceMemory]) -> SetBudget:
    """Every rank of a layout on its chip. memories: by rank.

    Raises:
        ResourceExhausted: as `budget_rank`, about the first rank whose chip is too small: what each part
            takes, what the chip has, the smallest layout and the quantisations that would fit on such chips.
        InvalidArgument: as `check_layout`.
    """
    ranks: list[RankBudget] = []
    for rank, memory in enumerate(memories):
        place = layout.place(rank)
        try:
            ranks.append(budget_rank(need, place, memory))
        except ResourceExhausted as error:
            raise _does_not_fit(need, place, memories, error) from error
    return SetBudget(need, layout, ranks)


def _parts_of(need: Need, place: RankPlace, memory: DeviceMemory) -> RankBudget:
    """All but the KV cache's size."""
    config, steps, alone = need.config, need.steps, place.layout.world_size == 1

    def activations(rows: int) -> int:
        return activation_bytes(config, place, need.form.dtype, rows=rows, window=steps.window)

    return RankBudget(
        place=place,
        share_bytes=memory_share(need.request, memory),
        weight_bytes=need.program_bytes
        if alone and need.program_bytes is not None
        else weight_bytes(config, place, need.form),
        kv_bytes_per_token=kv_bytes_per_token(config, place, need.form.kv_cache_dtype),
        activation_bytes=activations(steps.chunk_tokens + steps.window),
        graph_bytes=activations(steps.window) if steps.captures_graphs else 0,
    )


def _check_step(rank: RankBudget, page_size: int) -> None:
    pool = rank.page_count * page_size * rank.kv_bytes_per_token
    left = rank.share_bytes - rank.weight_bytes - pool
    wanted = rank.activation_bytes + rank.graph_bytes
    if wanted > left:
        raise ResourceExhausted(
            f"the largest step needs {in_gb(wanted)} for activations and graphs, and weights and KV cache "
            f"leave {in_gb(left)}; lower mem_fraction_static, chunked_prefill_size or max_running_requests",
            field="mem_fraction_static",
            reason="STEP_TOO_LARGE",
        )


def _does_not_fit(
    need: Need, place: RankPlace, memories: Sequence[DeviceMemory], error: ResourceExhausted
) -> ResourceExhausted:
    """The same refusal with all of the numbers, and what would do."""
    memory, layout = memories[place.rank], place.layout
    rank, fraction = _parts_of(need, place, memory), static_fraction(need.request, memory)
    # That there is no room for KV is said by the numbers.
    cause = "" if error.reason == "KV_CACHE_TOO_SMALL" else f" {error.message}."
    return ResourceExhausted(
        f"the model does not fit: rank {place.rank} of {describe_layout(layout)} takes "
        f"{in_gb(rank.weight_bytes)} of weights ({need.form.label}), {rank.kv_bytes_per_token} bytes of KV "
        f"cache for a token and {in_gb(rank.activation_bytes + rank.graph_bytes)} of activations; its chip "
        f"has {in_gb(rank.share_bytes)} ({in_gb(memory.free_bytes)} free), of which mem_fraction_static "
        f"{fraction:g} gives {in_gb(int(rank.share_bytes * fraction))} to weights and KV cache.{cause} "
        f"{_ways_out(need, layout, memories)}",
        field=error.field,
        reason="MODEL_DOES_NOT_FIT",
        weight_bytes=rank.weight_bytes,
        kv_bytes_per_token=rank.kv_bytes_per_token,
        activation_bytes=rank.activation_bytes,
        memory_bytes=rank.share_bytes,
    )


def _ways_out(need: Need, layout: ParallelLayout, memories: Sequence[DeviceMemory]) -> str:
    """The smallest layout as it is, and each quantisation in this layout, that would fit on such chips."""
    least = min(memories, key=lambda memory: memory.total_bytes)
    ways: list[str] = []
    if larger := _smallest_layout(need, least, more_than=layout.world_size):
        ways.append(describe_layout(larger))
    may_round = need.form.checkpoint is None and need.form.quantization not in ROUNDED
    for quantization in ROUNDED if may_round else ():
        other = replace(need, form=replace(need.form, quantization=quantization), program_bytes=None)
        if _fits(other, layout, least, executors=need.request.executors_on_host):
            weights = max(weight_bytes(need.config, each, other.form) for each in _heaviest(layout))
            ways.append(f"quantization {quantization} ({in_gb(weights)} of weights)")
    if not ways:
        return f"Up to {_PROPOSED_CHIPS[-1]} such chips would not do, nor would quantization in this layout"
    return f"What would fit on such chips: {', or '.join(ways)}"


def _smallest_layout(need: Need, memory: DeviceMemory, *, more_than: int) -> ParallelLayout | None:
    """Of the fewest chips; of equally many the one with most tensor ranks."""
    whole = weight_bytes(need.config, ALONE, need.form)
    for count in [each for each in _PROPOSED_CHIPS if each > more_than]:
        executors = need.request.executors_on_host - more_than + count
        # A quick look: ranks together hold no less than the model, and counting each rank's takes a while.
        if whole > count * memory_share(replace(need.request, executors_on_host=executors), memory):
            continue
        for layout in layouts_of(need.config, count):
            if _fits(need, layout, memory, executors=executors):
                return layout
    return None


def _fits(need: Need, layout: ParallelLayout, memory: DeviceMemory, *, executors: int) -> bool:
    asked = replace(need, request=replace(need.request, executors_on_host=executors))
    try:
        for place in _heaviest(layout):
            budget_rank(asked, place, memory)
    except ResourceExhausted:
        return False
    return True


def _heaviest(layout: ParallelLayout) -> list[RankPlace]:
    """Of each stage the first tensor rank: it has the biases and, where experts are uneven, one more. The
    stages with the tables come first: they are the most likely not to fit.
    """
    stages = dict.fromkeys((layout.pipeline - 1, *range(layout.pipeline)))
    return [layout.place(stage * layout.tensor) for stage in stages]
