"""Which part of a model each rank of a set holds: layers by stage, rows, columns and experts by tensor rank.

Pure: a completed configuration in, names and ranges out. No torch, no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.errors import InvalidArgument
from meshkit.modelstore.layouts import tensor_shapes

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_QUERY_ROWS = ("q_proj",)
_KV_ROWS = ("k_proj", "v_proj")
_ROWS = ("gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")
"""What comes out of them is a part of a sum over the ranks; a bias is added once, by the first."""
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class ParallelLayout:
    """How many ranks share each layer (tensor), and how many stages the layers are split over (pipeline)."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for field, value in (
            ("tensor_parallel_size", self.tensor),
            ("pipeline_parallel_size", self.pipeline),
        ):
            if value < 1:
                raise InvalidArgument(f"{field} is {value}; it must be at least 1", field=field)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    def place(self, rank: int) -> RankPlace:
        """Where a rank is. Ranks are numbered stage by stage: rank = stage * tensor + tensor rank."""
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(
                f"rank is {rank}; it has to be from 0 to {self.world_size - 1}", field="rank"
            )
        return RankPlace(self, rank)


@dataclass(frozen=True)
class RankPlace:
    """One rank of a layout."""

    layout: ParallelLayout
    rank: int

    @property
    def stage(self) -> int:
        """Its stage, from 0."""
        return self.rank // self.layout.tensor

    @property
    def tensor_rank(self) -> int:
        """Its place among the ranks that share its layers, from 0."""
        return self.rank % self.layout.tensor

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the last norm and the head."""
        return self.stage == self.layout.pipeline - 1

    def layers(self, count: int) -> range:
        """The layers of its stage, of `count` in all: even parts, the first ones a layer longer."""
        return _even_part(count, self.layout.pipeline, self.stage)

    def heads(self, count: int) -> range:
        """The query heads that it holds, of `count` in all, which its tensor ranks divide."""
        return _even_part(count, self.layout.tensor, self.tensor_rank)

    def kv_heads(self, count: int) -> range:
        """The key/value heads that it holds; where ranks outnumber them, neighbours hold the same one."""
        held = max(count // self.layout.tensor, 1)
        ranks = self.layout.tensor
        first = self.tensor_rank * held if count >= ranks else self.tensor_rank * count // ranks
        return range(first, first + held)

    def experts(self, count: int) -> range:
        """The routed experts that it holds, of `count` in all."""
        return _even_part(count, self.layout.tensor, self.tensor_rank)


ALONE = ParallelLayout().place(0)
"""The one rank of a model that is not split."""


@dataclass(frozen=True)
class TensorPart:
    """start to stop of dimension `axis`, then `padding` zeros, so that all ranks' parts are equally long."""

    axis: int
    start: int
    stop: int
    padding: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape, of a tensor of shape `whole`."""
        length = self.stop - self.start + self.padding
        return (*whole[: self.axis], length, *whole[self.axis + 1 :])


@dataclass(frozen=True)
class LocalSizes:
    """What of a layer's sizes is one rank's. vocabulary: rows of embedding and head, padding included."""

    heads: int
    kv_heads: int
    inner: int
    shared_inner: int
    vocabulary: int


def local_sizes(config: Mapping[str, Any], place: RankPlace) -> LocalSizes:
    """The sizes that a rank's layers have. shared_inner: of an expert that serves all tokens; 0: none."""
    ranks = place.layout.tensor
    return LocalSizes(
        heads=config["num_attention_heads"] // ranks,
        kv_heads=max(config["num_key_value_heads"] // ranks, 1),
        inner=config["intermediate_size"] // ranks,
        shared_inner=(config.get("shared_expert_intermediate_size") or 0) // ranks,
        vocabulary=-(-config["vocab_size"] // ranks),
    )


def check_layout(config: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Raise InvalidArgument (tensor_ or pipeline_parallel_size) where a model does not divide so."""
    ranks, stages, layers = layout.tensor, layout.pipeline, config["num_hidden_layers"]
    if stages > layers:
        raise InvalidArgument(
            f"pipeline_parallel_size is {stages}; each stage needs a layer, and the model has {layers}",
            field="pipeline_parallel_size",
            reason="LAYOUT_DOES_NOT_DIVIDE",
        )
    if wrong := _undivided(config, ranks):
        fitting = ", ".join(str(each) for each in range(1, ranks) if not _undivided(config, each))
        raise InvalidArgument(
            f"tensor_parallel_size is {ranks}, which does not divide the model's {', '.join(wrong)}; smaller "
            f"ones that do: {fitting}",
            field="tensor_parallel_size",
            reason="LAYOUT_DOES_NOT_DIVIDE",
        )


def rank_parts(config: Mapping[str, Any], place: RankPlace) -> dict[str, TensorPart | None]:
    """Every tensor that a rank holds, by Hugging Face name, in model order: its part, None: all of it.

    config: completed. Names keep the layer's number in the whole model.

    Raises:
        InvalidArgument: as `check_layout`.
    """
    check_layout(config, place.layout)
    parts: dict[str, TensorPart | None] = {}
    layers = place.layers(config["num_hidden_layers"])
    for name, shape in tensor_shapes(config).items():
        if _is_held(name, config, place, layers):
            parts[name] = _part(name, shape, config, place) if place.layout.tensor > 1 else None
    return parts


def rank_shapes(config: Mapping[str, Any], place: RankPlace) -> dict[str, tuple[int, ...]]:
    """The shapes of a rank's tensors, as `rank_parts`."""
    whole = tensor_shapes(config)
    return {
        name: part.shape(whole[name]) if part else whole[name]
        for name, part in rank_parts(config, place).items()
    }


def _undivided(config: Mapping[str, Any], ranks: int) -> list[str]:
    """The sizes that do not split over so many ranks, with their names."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {
        "num_attention_heads": heads,
        "shared_expert_intermediate_size": config.get("shared_expert_intermediate_size") or 0,
    }
    if not all(config.get("expert_layers", (False,))):
        sizes["intermediate_size"] = config["intermediate_size"]
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % ranks]
    if kv_heads % ranks and ranks % kv_heads:
        wrong.append(f"num_key_value_heads {kv_heads}")
    if "expert_layers" in config and _expert_count(config) < ranks:
        wrong.append(f"experts {_expert_count(config)}")
    return wrong


def _expert_count(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def _is_held(name: str, config: Mapping[str, Any], place: RankPlace, layers: range) -> bool:
    """layers: those of its stage."""
    if layer := _LAYER.match(name):
        if int(layer[1]) not in layers:
            return False
        if expert := _EXPERT.search(name):
            return int(expert[1]) in place.experts(_expert_count(config))
        module, _, kind = name.rpartition(".")
        return not (kind == "bias" and module.rpartition(".")[2] in _COLUMNS and place.tensor_rank > 0)
    if name == "model.embed_tokens.weight":
        return place.is_first_stage or (place.is_last_stage and config["tie_word_embeddings"])
    return place.is_last_stage


def _part(
    name: str, shape: tuple[int, ...], config: Mapping[str, Any], place: RankPlace
) -> TensorPart | None:
    """A tensor's part by the last words of its name; experts are whole, each on one rank."""
    module, _, kind = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    ranks, rank = place.layout.tensor, place.tensor_rank
    if leaf in _VOCABULARY:
        rows = -(-shape[0] // ranks)
        start, stop = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        return TensorPart(0, start, stop, padding=rows - (stop - start))
    if _EXPERT.search(name):
        return None
    if leaf in _QUERY_ROWS or leaf in _ROWS:
        return _even_rows(0, shape[0], place)
    if leaf in _KV_ROWS:
        heads = config["num_key_value_heads"]
        held, rows = place.kv_heads(heads), shape[0] // heads
        return TensorPart(0, held.start * rows, held.stop * rows)
    if leaf in _COLUMNS and kind == "weight":
        return _even_rows(1, shape[1], place)
    return None


def _even_rows(axis: int, length: int, place: RankPlace) -> TensorPart:
    each = length // place.layout.tensor
    return TensorPart(axis, place.tensor_rank * each, (place.tensor_rank + 1) * each)


def _even_part(count: int, parts: int, index: int) -> range:
    each, more = divmod(count, parts)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))
