"""A matrix in integers: its parts for ranks, its order of columns, and files that are not as they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from meshkit.errors import InvalidArgument
from meshkit.modelstore import open_model, tensor_shapes
from meshkit.modelstore.checkpoint_quantization import read_quantization
from meshkit.modelstore.sharding import ParallelLayout, TensorPart, rank_parts
from tests.unit.models.tiny_llama import write_model
from worker_svc.weights import DummyWeights, QuantizedWeights, WeightReader
from worker_svc.weights.parts import RankWeights, cut
from worker_svc.weights.quantized import StoredQuantized
from worker_svc.weights.rounding import round_to

NAME = "model.layers.0.self_attn.o_proj.weight"


def matrix(rows: int = 6, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("kind", "group"), [("w4a16", 32), ("w4a16", 128), ("w8a8", 128)])
@pytest.mark.parametrize("part", [TensorPart(0, 2, 5), TensorPart(1, 32, 96)])
def test_a_part_means_that_part_of_the_matrix(kind: str, group: int, part: TensorPart) -> None:
    stored = round_to(kind, matrix(), group)
    whole = stored.dequantize()
    wanted = whole.narrow(part.axis, part.start, part.stop - part.start)
    cut = stored.part(part)
    assert torch.equal(cut.dequantize(), wanted)
    assert cut.codes.untyped_storage().nbytes() == cut.codes.nbytes, "the rest of the matrix is let go"
    assert stored.part(None) is stored


def test_a_part_that_cuts_a_group_is_refused_with_the_numbers() -> None:
    stored = round_to("w4a16", matrix(), 64)
    with pytest.raises(InvalidArgument, match=r"columns 32 to 96 of 128.*group of 64") as caught:
        stored.part(TensorPart(1, 32, 96))
    assert caught.value.field == "tensor_parallel_size"


def test_columns_in_the_order_of_activations_do_not_part_and_rows_do() -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    plain = round_to("w4a16", matrix(), 32)
    stored = StoredQuantized("w4a16", plain.codes, plain.scale, plain.zero, 32, order)
    whole = stored.dequantize()
    assert torch.equal(whole[:, order], plain.dequantize())
    assert torch.equal(stored.part(TensorPart(0, 1, 3)).dequantize(), whole[1:3])
    with pytest.raises(InvalidArgument, match="desc_act"):
        stored.part(TensorPart(1, 0, 64))


def test_a_part_with_padding_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="pad"):
        round_to("w8a8", matrix(), 128).part(TensorPart(0, 4, 6, padding=1))


def write_zeros(folder: Path, **changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A tiny Llama's folder without its weights, and these."""
    write_model(folder, **changes)
    model = open_model(str(folder), cache_dir=folder / "cache", need_weights=False)
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in tensor_shapes(model.config).items()}


def write_gptq(
    folder: Path, changes: dict[str, np.ndarray[Any, Any]], **quantization: Any
) -> QuantizedWeights:
    """A tiny Llama whose o_proj of layer 0 is GPTQ's, group 16; all weights are 0."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, **quantization}
    tensors = write_zeros(folder, quantization_config=config)
    name = NAME.removesuffix(".weight")
    out, inner = tensors.pop(NAME).shape
    tensors |= {
        f"{name}.qweight": np.zeros((inner // 8, out), dtype=np.int32),
        f"{name}.qzeros": np.full((inner // 16, out // 8), 0x77777777, dtype=np.int32),
        f"{name}.scales": np.ones((inner // 16, out), dtype=np.float16),
        **{f"{name}.{suffix}": value for suffix, value in changes.items()},
    }
    save_file(tensors, folder / "model.safetensors")
    made = open_model(str(folder), cache_dir=folder / "cache")
    found = read_quantization(made.config)
    assert made.weights is not None
    assert found is not None
    return QuantizedWeights(WeightReader(made.weights), made.config, found)


def test_one_quantised_matrix_among_plain_ones_is_found_by_its_tensors(tmp_path: Path) -> None:
    weights = write_gptq(tmp_path, {})
    stored = weights.quantized(NAME)
    assert stored is not None
    assert weights.shape(NAME) == stored.shape
    # Codes of 0 with zero points of 8, which are stored as 7.
    assert bool((weights.read(NAME) == -8).all())
    assert weights.quantized("model.layers.0.self_attn.q_proj.weight") is None
    assert not any("qweight" in name or "scales" in name for name in weights.names())
    with pytest.raises(KeyError):
        weights.quantized("model.layers.9.self_attn.q_proj.weight")


def test_an_order_that_fills_no_groups_is_refused(tmp_path: Path) -> None:
    inner = write_gptq(tmp_path, {}).shape(NAME)[1]
    uneven = {"g_idx": np.minimum(np.arange(inner) // 8, inner // 16 - 1).astype(np.int32)}
    with pytest.raises(InvalidArgument, match=r"g_idx does not put .* columns into groups of 16"):
        write_gptq(tmp_path, uneven, desc_act=True).quantized(NAME)


def test_an_order_that_the_configuration_does_not_name_is_refused(tmp_path: Path) -> None:
    inner = write_gptq(tmp_path, {}).shape(NAME)[1]
    turned = {"g_idx": (np.arange(inner) // 16)[::-1].astype(np.int32)}
    with pytest.raises(InvalidArgument, match="names no activation order"):
        write_gptq(tmp_path, turned).quantized(NAME)


def test_words_of_another_width_are_refused(tmp_path: Path) -> None:
    out, inner = write_gptq(tmp_path, {}).shape(NAME)
    narrow = {"qweight": np.zeros((inner // 8, out), dtype=np.int8)}
    with pytest.raises(InvalidArgument, match="stored as I8; gptq-w4a16 has I32"):
        write_gptq(tmp_path, narrow).quantized(NAME)


def test_integers_where_weights_belong_are_refused_when_the_model_is_opened(tmp_path: Path) -> None:
    tensors = write_zeros(tmp_path)
    tensors[NAME] = tensors[NAME].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"stored as I8.*lack of one.*weights") as caught:
        open_model(str(tmp_path), cache_dir=tmp_path / "cache")
    assert caught.value.reason == "ENCODING_UNSUPPORTED"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_holds_its_part_of_each_matrix(tmp_path: Path, rank: int) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True}
    write_model(tmp_path, quantization_config=config)
    model = open_model(str(tmp_path), cache_dir=tmp_path / "cache", need_weights=False)
    whole = DummyWeights(model.config)
    place = ParallelLayout(tensor=2).place(rank)
    weights = RankWeights(whole, model.config, place)
    matrices = [name for name in weights.names() if whole.quantized(name) is not None]
    assert len(matrices) == 2 * 7
    for name in matrices:
        stored, all_of_it = weights.quantized(name), whole.quantized(name)
        assert stored is not None
        assert all_of_it is not None
        part = rank_parts(model.config, place)[name]
        assert part is not None
        assert stored.shape == weights.shape(name)
        assert torch.equal(stored.dequantize(), cut(all_of_it.dequantize(), part))
