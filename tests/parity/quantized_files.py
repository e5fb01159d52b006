"""Writes a saved model as a quantised checkpoint, bit by bit as each format's document has it, and its twin:
the same weights as floats. Independent of what reads them: numpy, one word at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

_MATRIX = re.compile(r"model\.layers\.\d+\..*(_proj|experts\.\d+\.w[123])\.weight$")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ, `awq/utils/packing_utils.py`: the output that lies in each nibble of a word."""


@dataclass(frozen=True)
class Codes:
    """A matrix in integers. codes, by column groups[c]: value = (codes - zero) * scale, float16 scales.

    codes [out, in]; scale, zero [out, groups]; groups [in].
    """

    codes: Array
    scale: Array
    zero: Array
    groups: Array

    def values(self) -> Array:
        """float32 [out, in], made in float64."""
        zero, scale = (
            self.zero[:, self.groups].astype(np.float64),
            self.scale[:, self.groups].astype(np.float64),
        )
        return ((self.codes.astype(np.float64) - zero) * scale).astype(np.float32)


@dataclass(frozen=True)
class Format:
    """One way to write a checkpoint. scramble: columns are in groups of no order."""

    config: Mapping[str, Any]
    write: Callable[[str, Codes], Tensors]
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    scramble: bool = False
    keeps: Callable[[str], bool] = field(default=lambda name: False)

    def rounded(self, weight: Array, seed: int) -> Codes:
        """Round to nearest. group 0: one for all columns."""
        columns = weight.shape[1]
        group = self.group or columns
        groups = np.arange(columns) // group
        if self.scramble:
            np.random.default_rng(seed).shuffle(groups)
        count = columns // group
        by_group = np.stack([weight[:, groups == each] for each in range(count)], axis=1).astype(np.float64)
        scale, zero = self._scales(by_group)
        steps = np.rint(weight / scale[:, groups]) + zero[:, groups]
        low, high = (-128, 127) if self.bits == 8 else (0, 15)
        return Codes(np.clip(steps, low, high).astype(np.int64), scale, zero, groups)

    def _scales(self, by_group: Array) -> tuple[Array, Array]:
        if self.symmetric:
            scale = np.abs(by_group).max(axis=-1) / (127 if self.bits == 8 else 7.5)
            zero = np.full(scale.shape, 0 if self.bits == 8 else 8)
        else:
            low, high = np.minimum(by_group.min(axis=-1), 0), np.maximum(by_group.max(axis=-1), 0)
            scale = (high - low) / 15
            zero = np.clip(np.rint(-low / scale), 0, 15).astype(np.int64)
        return scale.astype(np.float16), zero


def write_quantized(source: Path, folder: Path, form: Format) -> tuple[Path, Path]:
    """(the checkpoint, its twin in floats) of the model in `source`, each a folder of two files."""
    files = sorted(source.glob("*.safetensors"))
    plain = {name: tensor for file in files for name, tensor in load_file(file).items()}
    config = json.loads((source / "config.json").read_text())
    stored, floats = quantize(plain, form)
    quantized = {**config, "quantization_config": dict(form.config)}
    return save(folder / "quantized", stored, quantized), save(folder / "floats", floats, config)


def quantize(plain: Mapping[str, Array], form: Format) -> tuple[Tensors, Tensors]:
    """(what is stored, what it means) of a model's tensors."""
    stored: Tensors = {}
    floats: Tensors = {}
    for seed, (name, tensor) in enumerate(sorted(plain.items())):
        if not _MATRIX.search(name) or form.keeps(name):
            stored[name] = floats[name] = tensor
            continue
        codes = form.rounded(tensor, seed)
        floats[name] = codes.values()
        stored |= form.write(name.removesuffix(".weight"), codes)
    return stored, floats


def save(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    """A model as two safetensors files with their index, and an empty tokenizer."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: np.ascontiguousarray(tensors[name]) for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in halves.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def word(values: Array) -> int:
    """Eight values of four bits, the first in the lowest, as a signed int32."""
    assert values.shape == (8,)
    assert set(values.tolist()) <= set(range(16))
    made = sum(int(value) << (4 * place) for place, value in enumerate(values))
    return made - (1 << 32) if made >= 1 << 31 else made


def _words(rows: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """[n, m] -> int32 [n, m / 8], rounded up with zeros. A sample of it is made once more by `word`."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    eights = padded.reshape(len(rows), -1, 8)[..., list(order)].astype(np.uint32)
    words: Array = (
        (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32).view(np.int32)
    )
    row = len(rows) // 2
    assert words[row].tolist() == [word(each) for each in eights[row]]
    return words


def write_awq(matrix: str, each: Codes) -> Tensors:
    """AutoAWQ's WQLinear_GEMM: words along the outputs, which it interleaves; all of it [in, out]."""
    return {
        f"{matrix}.qweight": _words(each.codes.T, _AWQ_ORDER),
        f"{matrix}.qzeros": _words(each.zero.T, _AWQ_ORDER),
        f"{matrix}.scales": each.scale.T,
    }


def write_gptq(matrix: str, each: Codes, *, less: int = 1) -> Tensors:
    """AutoGPTQ's QuantLinear: words along the inputs; zero points along the outputs, `less` than they are."""
    return {
        f"{matrix}.qweight": _words(each.codes).T,
        f"{matrix}.qzeros": _words((each.zero - less).T),
        f"{matrix}.scales": each.scale.T,
        f"{matrix}.g_idx": each.groups.astype(np.int32),
    }


def write_gptq_v2(matrix: str, each: Codes) -> Tensors:
    """GPTQModel's checkpoint_format gptq_v2: zero points as they are."""
    return write_gptq(matrix, each, less=0)


def write_packed(matrix: str, each: Codes, *, symmetric: bool = False, ordered: bool = False) -> Tensors:
    """compressed-tensors' pack-quantized: words along the inputs; zero points in words along the outputs."""
    tensors: Tensors = {
        f"{matrix}.weight_packed": _words(each.codes),
        f"{matrix}.weight_scale": each.scale,
        f"{matrix}.weight_shape": np.array(each.codes.shape, dtype=np.int64),
    }
    if not symmetric:
        tensors[f"{matrix}.weight_zero_point"] = _words(each.zero.T).T
    if ordered:
        tensors[f"{matrix}.weight_g_idx"] = each.groups.astype(np.int32)
    return tensors


def write_integers(matrix: str, each: Codes) -> Tensors:
    """compressed-tensors' int-quantized: codes of a byte, a scale for each output."""
    return {f"{matrix}.weight": each.codes.astype(np.int8), f"{matrix}.weight_scale": each.scale}


def _packed_config(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights},
            }
        },
    }


INTEGERS_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FORMATS: dict[str, Format] = {
    "awq": Format({**_AWQ, "modules_to_not_convert": ["layers.0.self_attn.k_proj"]}, write_awq,
                  keeps=lambda name: "layers.0.self_attn.k_proj" in name),
    "awq-rows": Format({**_AWQ, "group_size": -1, "version": "GEMM"}, write_awq, group=0),
    "gptq": Format(_GPTQ, write_gptq, symmetric=True),
    "gptq-v2": Format({**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, write_gptq_v2),
    "gptq-order": Format({**_GPTQ, "desc_act": True}, write_gptq, symmetric=True, scramble=True),
    "packed": Format(_packed_config(group_size=32),
                     lambda name, each: write_packed(name, each, symmetric=True), symmetric=True),
    "packed-zeros": Format(_packed_config(group_size=32, symmetric=False), write_packed),
    "packed-rows": Format(_packed_config(strategy="channel", symmetric=False), write_packed, group=0),
    "packed-order": Format(_packed_config(group_size=32, symmetric=False, actorder="group"),
                           lambda name, each: write_packed(name, each, ordered=True), scramble=True),
    "integers": Format(INTEGERS_CONFIG, write_integers, bits=8, group=0, symmetric=True),
}  # fmt: skip
"""All w4a16, but "integers", which is w8a8."""
