"""`quantization_config` of the compressed-tensors format: a group of layers, its weights and activations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshkit.modelstore.quantization_schemes import QuantizationScheme, one_of, refuse, whole_number

_PACKED, _INTEGERS = "pack-quantized", "int-quantized"


def read_compressed_tensors(document: Mapping[str, Any], source: str) -> QuantizationScheme:
    """The scheme of its only group. Raises InvalidArgument (model_path) for what no operator expresses."""
    groups = document.get("config_groups") or {}
    if len(groups) != 1:
        refuse("config_groups", sorted(groups), "one group of layers", source=source)
    name, group = next(iter(groups.items()))
    where = f"config_groups.{name}."
    form = group.get("format") or document.get("format")
    if form not in (_PACKED, _INTEGERS):
        refuse("format", form, f"{_PACKED} (4 bits), {_INTEGERS} (8 bits)", source=source)
    sparsity = (document.get("sparsity_config") or {}).get("format", "dense")
    if sparsity not in ("dense", None):
        refuse("sparsity_config.format", sparsity, "dense", source=source)
    for field in ("output_activations", "transform_config"):
        if (group if field == "output_activations" else document).get(field):
            refuse(field, "set", "none", source=source)
    rule = _Rule(group.get("targets") or (), document.get("ignore") or ())
    read = _read_packed if form == _PACKED else _read_integers
    return read(group, where, source, rule)


class _Rule:
    """Which linear layers a group quantises: those that `targets` name, without those of `ignore`."""

    def __init__(self, targets: Sequence[str], ignored: Sequence[str]) -> None:
        self._targets, self._ignored = targets, ignored

    def __call__(self, matrix: str) -> bool:
        return _matches(matrix, self._targets) and not _matches(matrix, self._ignored)


def _matches(matrix: str, patterns: Sequence[str]) -> bool:
    """By name, by "re:" and a pattern, or as "Linear", the class that all matrices here have."""
    return any(
        re.match(each[3:], matrix) is not None if each.startswith("re:") else each in (matrix, "Linear")
        for each in patterns
    )


def _read_packed(group: Mapping[str, Any], where: str, source: str, rule: _Rule) -> QuantizationScheme:
    weights = group.get("weights") or {}
    if group.get("input_activations"):
        refuse(f"{where}input_activations", "set", "none beside 4-bit weights", source=source)
    inside = f"{where}weights."
    _check_integers(weights, 4, inside, source)
    strategy = one_of(weights, "strategy", ("group", "channel"), source=source, default="group", where=inside)
    size = whole_number(weights, "group_size", source=source, where=inside) if strategy == "group" else 0
    order = weights.get("actorder")
    # "static" orders the work only; the groups stay where they are.
    if order not in (None, False, True, "static", "weight", "dynamic", "group"):
        refuse(f"{inside}actorder", order, "null, static (weight), dynamic (group)", source=source)
    return QuantizationScheme(
        method="compressed-tensors",
        kind="w4a16",
        layout="packed",
        group=size,
        symmetric=bool(
            one_of(weights, "symmetric", (True, False), source=source, default=True, where=inside)
        ),
        ordered=order in (True, "dynamic", "group") and size > 0,
        takes=rule,
    )


def _read_integers(group: Mapping[str, Any], where: str, source: str, rule: _Rule) -> QuantizationScheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    inside = f"{where}weights."
    _check_integers(weights, 8, inside, source)
    one_of(weights, "symmetric", (True,), source=source, default=True, where=inside)
    strategies = ("channel", "tensor")
    strategy = one_of(weights, "strategy", strategies, source=source, default="channel", where=inside)
    if not inputs:
        refuse(
            f"{where}input_activations",
            None,
            "8 bits, dynamic by token: W8A16 has no operator",
            source=source,
        )
    inside = f"{where}input_activations."
    _check_integers(inputs, 8, inside, source)
    one_of(inputs, "dynamic", (True,), source=source, default=False, where=inside)
    one_of(inputs, "strategy", ("token",), source=source, default="token", where=inside)
    one_of(inputs, "symmetric", (True,), source=source, default=True, where=inside)
    return QuantizationScheme(
        method="compressed-tensors",
        kind="w8a8",
        layout="integers",
        group=0,
        symmetric=True,
        one_scale=strategy == "tensor",
        takes=rule,
    )


def _check_integers(arguments: Mapping[str, Any], bits: int, where: str, source: str) -> None:
    one_of(arguments, "type", ("int",), source=source, default="int", where=where)
    one_of(arguments, "num_bits", (bits,), source=source, where=where)
