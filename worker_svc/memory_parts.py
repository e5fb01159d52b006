"""What a rank of a model takes of its chip's memory: weights, KV cache, activations.

Pure: a completed configuration and sizes in, bytes out. No clock, no file, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from meshkit.modelstore import BLOCK_LAYOUTS
from meshkit.modelstore.checkpoint_quantization import CheckpointQuantization
from meshkit.modelstore.sharding import ALONE, RankPlace, local_sizes, rank_shapes
from plugins.sdk.tensors import dtype_size

GROUP_SIZES = (128, 64, 32)
"""Columns that share a scale in w4a16: as worker_svc.layers.quantization, which imports torch, has them."""
ROUNDED = ("w8a8", "w4a16")
"""Values of `quantization` that round weights as they are loaded."""
_SCALE_BYTES, _ZERO_BYTES, _ORDER_BYTES, _WIDE_BYTES = 4, 1, 8, 4
_SAMPLING_BYTES = 4 + 4 + 3 * 8 + 1
"""For each logit while tokens are drawn: it and, where other rows are greedy, its copy in float32; its score,
weight and running sum in float64; whether it is left (plugins.sdk.reference.sampling).
"""
_EMBEDDING = "model.embed_tokens.weight"
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PLAIN = re.compile(r"(embed_tokens|lm_head|\.gate|shared_expert_gate)\.weight$")
"""Embeddings, heads, routers and gates of shared experts: no policy quantises them."""


@dataclass(frozen=True)
class Packing:
    """How a matrix is quantised: w8a8 or w4a16. group: columns that share a scale in w4a16, 0: all. ordered:
    the order of its columns is kept with it.
    """

    kind: str
    group: int = 0
    ordered: bool = False

    def nbytes(self, shape: Sequence[int]) -> int:
        """Codes, scales (float32), zero points (a byte) and order (int64) of a matrix [out, in]."""
        rows, columns = shape
        order = columns * _ORDER_BYTES if self.ordered else 0
        if self.kind == "w8a8":
            return rows * (columns + _SCALE_BYTES) + order
        groups = columns // self.group if self.group else 1
        return rows * (columns // 2 + groups * (_SCALE_BYTES + _ZERO_BYTES)) + order


@dataclass(frozen=True)
class ModelForm:
    """How a model is held. quantization: the framework's at load, w8a8 or w4a16 (all else rounds no weight).
    checkpoint: how its files are quantised; nothing else is then.
    """

    dtype: str
    kv_cache_dtype: str
    quantization: str = ""
    checkpoint: CheckpointQuantization | None = None

    @property
    def label(self) -> str:
        """For people."""
        quantization = self.checkpoint.label if self.checkpoint else self.quantization
        return f"{self.dtype}, {quantization}" if quantization else self.dtype

    def nbytes(self, name: str, shape: Sequence[int]) -> int:
        """Bytes of a rank's tensor of that name and shape."""
        if len(shape) == 2 and (packing := self._packing(name, shape)):
            return packing.nbytes(shape)
        return prod(shape) * dtype_size(self.dtype)

    def _packing(self, name: str, shape: Sequence[int]) -> Packing | None:
        if self.checkpoint is not None:
            scheme = self.checkpoint.scheme
            if not self.checkpoint.holds(name.removesuffix(".weight"), tuple(shape)):
                return None
            return Packing(scheme.kind, scheme.group, scheme.ordered)
        if self.quantization not in ROUNDED or _PLAIN.search(name):
            return None
        if self.quantization == "w8a8":
            return Packing("w8a8")
        # An expert's matrices are of one operator, so all of them have groups or none has.
        sides = shape if ".experts." in name else shape[1:]
        return Packing("w4a16", _group_size(shape[1])) if all(map(_group_size, sides)) else None


@dataclass(frozen=True)
class StepSizes:
    """The largest step: prompt tokens of a chunk, and decoding requests (window). captures_graphs: decode
    steps are captured, and a graph keeps the memory of one.
    """

    chunk_tokens: int
    window: int
    captures_graphs: bool = False


def weight_bytes(config: Mapping[str, Any], place: RankPlace, form: ModelForm) -> int:
    """Bytes of a rank's weights as operators hold them: what `LoadedModel.weight_bytes` says after a load.

    A tied head is a copy of the embedding on the chip: both count.
    """
    total = 0
    for name, shape in rank_shapes(config, place).items():
        copies = 1
        if name == _EMBEDDING:
            copies = place.is_first_stage + (place.is_last_stage and bool(config["tie_word_embeddings"]))
        total += copies * form.nbytes(name, shape)
    return total


def program_weight_bytes(
    config: Mapping[str, Any], encoding_of: Callable[[str], str], *, taken: Collection[str]
) -> int:
    """The same of a model that a step program serves whole. encoding_of: how a tensor is stored.

    A matrix stays as stored where the program takes its encoding, else it is float32; query, key and value,
    and gate and up, are one matrix, so float32 where they are stored differently. All vectors are float32,
    and tables of positions count as weights here.
    """
    shapes = rank_shapes(config, ALONE)
    held = {name: encoding_of(name) if encoding_of(name) in taken else "F32" for name in shapes}
    total = _table_bytes(config)
    for name, shape in shapes.items():
        as_held = len(shape) == 2 and len({held[each] for each in _one_product(name)}) == 1
        values, nbytes = BLOCK_LAYOUTS[held[name] if as_held else "F32"]
        copies = 2 if name == _EMBEDDING and config["tie_word_embeddings"] else 1
        total += copies * prod(shape) // values * nbytes
    return total


def kv_bytes_per_token(config: Mapping[str, Any], place: RankPlace, kv_cache_dtype: str) -> int:
    """Keys and values of one token in the layers of a rank's stage."""
    layers = len(place.layers(config["num_hidden_layers"]))
    heads, head_dim = local_sizes(config, place).kv_heads, int(config["head_dim"])
    return 2 * layers * heads * head_dim * dtype_size(kv_cache_dtype)


def activation_bytes(
    config: Mapping[str, Any], place: RankPlace, dtype: str, *, rows: int, window: int
) -> int:
    """Most bytes that live at once in a step of `rows` tokens, `window` of which get logits.

    Counted, as worker_svc.models.decoder and worker_svc.layers hold them, in the compute dtype:
    - by layer, beside the residual stream and its norm [rows, hidden] each, as the layer before left them and
      as they are within this one, the larger of
      attention: the product of query, key and value, query and key turned, what was attended, the output;
      feed-forward: gate and up, their product, both [rows, inner]; of experts the same for each chosen one
      that the rank holds, and a float32 sum [rows, hidden];
    - behind the last layer: hidden states [rows, hidden], logits [window, vocabulary] in the compute dtype,
      in float32, and what drawing tokens makes of them: 33 bytes each;
    - with several tensor ranks one [rows, hidden] more, which is summed over them, and logits before they are
      gathered; between stages the pair [2, rows, hidden] that is sent;
    - for good: float32 tables of positions [context, head size], two where layers with a window have another.
    Not counted is what a plugin's operators need inside: pages that attention gathers and scores that it
    writes down where it has no kernel, unpacked weights.
    """
    size, hidden = dtype_size(dtype), int(config["hidden_size"])
    layer = 4 * hidden + max(_attention_width(config, place), *_inner_widths(config, place))
    if place.layout.tensor > 1:
        layer += hidden
    if place.layout.pipeline > 1:
        layer += 2 * hidden
    mixing = _WIDE_BYTES * hidden if "expert_layers" in config else 0
    peak = rows * (layer * size + mixing)
    if place.is_last_stage:
        peak = max(peak, _logits_bytes(config, place, size, rows=rows, window=window))
    return peak + _table_bytes(config)


def _one_product(name: str) -> list[str]:
    """The matrices that a step program joins with `name` into one."""
    module, _, leaf = name.removesuffix(".weight").rpartition(".")
    joined = next((each for each in _JOINED if leaf in each), None)
    return [f"{module}.{each}.weight" for each in joined] if joined else [name]


def _group_size(columns: int) -> int:
    return next((size for size in GROUP_SIZES if columns % size == 0), 0)


def _attention_width(config: Mapping[str, Any], place: RankPlace) -> int:
    """Numbers of a row that attention has at once."""
    sizes, head_dim = local_sizes(config, place), int(config["head_dim"])
    query, key = sizes.heads * head_dim, sizes.kv_heads * head_dim
    product, turned, attended = query + 2 * key, query + key, query
    return product + turned + attended + int(config["hidden_size"])


def _inner_widths(config: Mapping[str, Any], place: RankPlace) -> list[int]:
    """The same of each kind of feed-forward part that the model has."""
    sizes, kinds = local_sizes(config, place), config.get("expert_layers", (False,))
    widths = [] if all(kinds) else [_gated_width(sizes.inner)]
    if any(kinds):
        held = len(place.experts(int(config.get("num_experts") or config["num_local_experts"])))
        chosen = min(config["num_experts_per_tok"], held)
        widths.append(
            chosen * _gated_width(config.get("moe_intermediate_size") or config["intermediate_size"])
        )
        widths.append(_gated_width(sizes.shared_inner) + int(config["hidden_size"]))
    return widths


def _gated_width(inner: int) -> int:
    """Gate and up, and their product."""
    return 3 * inner


def _logits_bytes(config: Mapping[str, Any], place: RankPlace, size: int, *, rows: int, window: int) -> int:
    vocabulary, hidden = int(config["vocab_size"]), int(config["hidden_size"])
    narrow = 0 if size == _WIDE_BYTES else vocabulary * size
    if place.layout.tensor > 1:
        narrow += local_sizes(config, place).vocabulary * size
    return rows * hidden * size + window * (narrow + _SAMPLING_BYTES * vocabulary)


def _table_bytes(config: Mapping[str, Any]) -> int:
    local = "rope_local_base_freq" in config and "sliding_attention" in config["layer_types"]
    positions, head_dim = int(config["max_position_embeddings"]), int(config["head_dim"])
    return (2 if local else 1) * positions * head_dim * _WIDE_BYTES
