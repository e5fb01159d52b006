"""Reading tensors of the real model and of small files written here."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from meshkit.modelstore import ModelFolder, TensorEntry, WeightIndex, tensor_shapes
from meshkit.modelstore.safetensors_index import read_safetensors_index
from worker_svc.weights import DummyWeights, WeightReader, WeightSource


@pytest.fixture
def reader(smollm2: ModelFolder) -> WeightReader:
    assert smollm2.weights is not None
    return WeightReader(smollm2.weights)


@pytest.fixture(scope="module")
def reference(smollm2: ModelFolder) -> dict[str, gguf.ReaderTensor]:
    """The same file as the gguf library reads it, by GGUF name."""
    [file] = smollm2.source.glob("*.gguf")
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def reference_values(tensor: gguf.ReaderTensor) -> torch.Tensor:
    return torch.from_numpy(
        np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    )


@pytest.mark.parametrize(
    ("name", "gguf_name"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
        ("model.layers.7.post_attention_layernorm.weight", "blk.7.ffn_norm.weight"),
    ],
)
def test_a_tensor_of_the_real_model_equals_the_librarys(
    reader: WeightReader, reference: dict[str, gguf.ReaderTensor], name: str, gguf_name: str
) -> None:
    values = reader.read(name)
    assert values.shape == reader.shape(name)
    assert torch.equal(values, reference_values(reference[gguf_name]))


@pytest.mark.parametrize(("part", "heads"), [("q", 9), ("k", 3)])
def test_rows_of_q_and_k_come_in_hugging_faces_rotary_order(
    reader: WeightReader, reference: dict[str, gguf.ReaderTensor], part: str, heads: int
) -> None:
    name = f"model.layers.3.self_attn.{part}_proj.weight"
    stored = reference_values(reference[f"blk.3.attn_{part}.weight"])
    ours = reader.read(name)
    # Stored row 2i of a head is Hugging Face's row i, stored row 2i + 1 is row i + 32 (head_dim 64).
    for head in range(heads):
        start = head * 64
        assert torch.equal(ours[start : start + 32], stored[start : start + 64 : 2])
        assert torch.equal(ours[start + 32 : start + 64], stored[start + 1 : start + 64 : 2])


def test_raw_is_what_the_file_holds_and_raw_rows_is_in_rotary_order(reader: WeightReader) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    entry = reader._tensors[name]
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset)
        assert bytes(reader.raw(name).numpy()) == stream.read(entry.nbytes)
    rows = reader.raw_rows(name)
    assert rows.shape == (576, 576 // 32 * 20)
    assert torch.equal(rows[1], reader.raw(name).view(576, -1)[2])


def test_a_tensor_can_be_read_as_another_dtype(reader: WeightReader) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(reader.read(name, torch.bfloat16), reader.read(name).to(torch.bfloat16))


def test_an_unknown_name_is_a_key_error(reader: WeightReader) -> None:
    with pytest.raises(KeyError):
        reader.read("model.layers.30.mlp.up_proj.weight")


def test_safetensors_of_all_float_types_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = {
        "a.weight": torch.randn(3, 5),
        "b.weight": torch.randn(7, dtype=torch.float16),
        "c.weight": torch.randn(2, 3, dtype=torch.bfloat16),
        "empty.weight": torch.empty(0, 4),
    }
    save_file(written, tmp_path / "model.safetensors")
    index = read_safetensors_index(tmp_path)
    assert index is not None
    reader = WeightReader(index)
    assert set(reader.names()) == set(written)
    for name, tensor in written.items():
        assert torch.equal(reader.read(name), tensor.to(torch.float32))
        assert reader.read(name).shape == tensor.shape


def test_writing_to_what_was_read_never_reaches_the_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(64))
    reader = WeightReader(
        WeightIndex({"w": TensorEntry(file, offset=0, nbytes=64, shape=(16,), encoding="F32")})
    )
    reader.raw("w").fill_(255)
    reader.read("w").fill_(1.0)
    assert file.read_bytes() == bytes(64)


def test_a_tensor_larger_than_a_chunk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_svc.weights.reader._CHUNK_VALUES", 64)
    values = torch.randn(13, 32)
    save_file({"w": values}, tmp_path / "model.safetensors")
    index = read_safetensors_index(tmp_path)
    assert index is not None
    assert torch.equal(WeightReader(index).read("w"), values)


def test_dummy_weights_have_the_real_names_and_shapes_and_depend_on_seed_and_name_only(
    smollm2: ModelFolder, reader: WeightReader
) -> None:
    dummy: WeightSource = DummyWeights(smollm2.config, seed=5)
    assert set(dummy.names()) == set(reader.names()) == set(tensor_shapes(smollm2.config))
    assert all(dummy.shape(name) == reader.shape(name) for name in dummy.names())
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    values = dummy.read(first)
    assert torch.equal(DummyWeights(smollm2.config, seed=5).read(first), values)
    assert not torch.equal(DummyWeights(smollm2.config, seed=6).read(first), values)
    assert not torch.equal(dummy.read(second), values)
    assert 0.015 < values.std().item() < 0.025
    assert abs(dummy.read("model.norm.weight").mean().item() - 1.0) < 0.01
    assert dummy.read(first, torch.bfloat16).dtype == torch.bfloat16
