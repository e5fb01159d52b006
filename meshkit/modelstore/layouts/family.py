"""One family's layout as data, and the shapes that families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def _nothing(config: dict[str, Any]) -> None:
    del config


def _all_full(config: Config) -> list[str]:
    return ["full_attention"] * config["num_hidden_layers"]


@dataclass(frozen=True)
class FamilyLayout:
    """What makes a configuration of one architecture complete.

    layer_shapes: (configuration, layer) -> name within the layer -> shape. defaults: what Hugging Face takes
    for a field that is left out. sizes: fields that have to be positive integers, beside those that every
    family has. activation: the only one that is run. layer_types: of a configuration that does not list them.
    prepare: works on the fields before they are checked.
    """

    architecture: str
    layer_shapes: Callable[[Config, int], Shapes]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sequence[str] = ()
    activation: str = "silu"
    layer_types: Callable[[Config], list[str]] = _all_full
    prepare: Callable[[dict[str, Any]], None] = _nothing


def attention_shapes(
    config: Config, *, input_bias: bool = False, output_bias: bool = False, head_norms: bool = False
) -> Shapes:
    """Projections of query, key, value and output. head_norms: query and key are normalised by head."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (query_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, query_rows),
    }
    if input_bias:
        add_biases(shapes, [f"self_attn.{part}_proj" for part in "qkv"])
    if output_bias:
        add_biases(shapes, ["self_attn.o_proj"])
    if head_norms:
        shapes |= {f"self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    return shapes


def gated_shapes(config: Config, block: str, inner: int, *, bias: bool = False) -> Shapes:
    """A gated feed-forward part of `inner` columns at `block`."""
    hidden = config["hidden_size"]
    shapes: Shapes = {
        f"{block}.gate_proj.weight": (inner, hidden),
        f"{block}.up_proj.weight": (inner, hidden),
        f"{block}.down_proj.weight": (hidden, inner),
    }
    if bias:
        add_biases(shapes, [f"{block}.{part}_proj" for part in ("gate", "up", "down")])
    return shapes


def norm_shapes(config: Config, *names: str) -> Shapes:
    """Norms over the hidden size."""
    return {f"{name}.weight": (config["hidden_size"],) for name in names}


def add_biases(shapes: Shapes, names: Sequence[str]) -> None:
    """One number for each row of the matrices `names`."""
    for name in names:
        shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
