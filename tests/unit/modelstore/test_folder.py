"""Folders in Hugging Face layout, references that lead nowhere, and the places on disk."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshkit.errors import InvalidArgument
from meshkit.modelstore import default_cache_dir, open_model, tensor_shapes
from meshkit.modelstore.publish import publish_folder

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "tie_word_embeddings": True,
    "eos_token_id": 7,
}


class HuggingFaceFolder:
    """A model folder that tests change and spoil."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.write("config.json", CONFIG)
        self.write("tokenizer.json", {})
        shapes = tensor_shapes({**CONFIG, "num_key_value_heads": 4, "head_dim": 8, "attention_bias": False,
                                "mlp_bias": False})  # fmt: skip
        self.tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}
        save_file(self.tensors, path / "model.safetensors")

    def write(self, name: str, document: Any) -> None:
        (self.path / name).write_text(json.dumps(document), encoding="utf-8")

    def shard(self) -> None:
        """Spread the weights over two files with an index."""
        (self.path / "model.safetensors").unlink()
        names = sorted(self.tensors)
        parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
        for file, held in parts.items():
            save_file({name: self.tensors[name] for name in held}, self.path / file)
        weight_map = {name: file for file, held in parts.items() for name in held}
        self.write("model.safetensors.index.json", {"weight_map": weight_map})


@pytest.fixture
def folder(tmp_path: Path) -> HuggingFaceFolder:
    return HuggingFaceFolder(tmp_path / "model")


def refusal(reference: str | Path, cache_dir: Path, **options: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        open_model(str(reference), cache_dir=cache_dir, **options)
    assert caught.value.field == "model_path"
    return caught.value


def test_a_folder_opens_with_the_defaults_that_its_config_leaves_out(
    folder: HuggingFaceFolder, tmp_path: Path
) -> None:
    opened = open_model(str(folder.path), cache_dir=tmp_path)
    assert (opened.name, opened.eos_token_ids) == ("model", (7,))
    assert (opened.context_length, opened.vocab_size) == (2048, 50)
    assert (opened.config["num_key_value_heads"], opened.config["head_dim"]) == (4, 8)
    assert (opened.config["rope_theta"], opened.config["rms_norm_eps"]) == (10000.0, 1e-6)
    assert opened.weights is not None
    entry = opened.weights.tensors["model.layers.1.mlp.gate_proj.weight"]
    assert (entry.shape, entry.encoding, entry.nbytes) == ((64, 32), "F32", 64 * 32 * 4)
    assert entry.rope_permuted_heads is None


def test_the_newer_spelling_of_rotary_settings_is_understood(
    folder: HuggingFaceFolder, tmp_path: Path
) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    folder.write("config.json", {**CONFIG, "rope_parameters": parameters})
    config = open_model(str(folder.path), cache_dir=tmp_path).config
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}


def test_shards_are_read_through_their_index(folder: HuggingFaceFolder, tmp_path: Path) -> None:
    folder.shard()
    weights = open_model(str(folder.path), cache_dir=tmp_path).weights
    assert weights is not None
    assert set(weights.tensors) == set(folder.tensors)
    assert [file.name for file in weights.files] == ["one.safetensors", "two.safetensors"]


def test_the_version_of_the_weights_is_stable_and_changes_with_a_file(
    folder: HuggingFaceFolder, tmp_path: Path
) -> None:
    first = open_model(str(folder.path), cache_dir=tmp_path).weights_version
    assert open_model(str(folder.path), cache_dir=tmp_path).weights_version == first
    os.utime(folder.path / "model.safetensors", ns=(1, 1))
    assert open_model(str(folder.path), cache_dir=tmp_path).weights_version != first


def test_generation_config_goes_before_config_for_end_tokens(
    folder: HuggingFaceFolder, tmp_path: Path
) -> None:
    folder.write("generation_config.json", {"eos_token_id": [3, 4]})
    assert open_model(str(folder.path), cache_dir=tmp_path).eos_token_ids == (3, 4)


def test_chat_templates_are_found_wherever_models_keep_them(
    folder: HuggingFaceFolder, tmp_path: Path
) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder.write("tokenizer_config.json", {"chat_template": named, "bos_token": {"content": "<s>"}})
    config = open_model(str(folder.path), cache_dir=tmp_path).tokenizer_config
    assert (config["chat_template"], config["bos_token"]) == ("D", "<s>")
    (folder.path / "chat_template.jinja").write_text("J")
    assert open_model(str(folder.path), cache_dir=tmp_path).tokenizer_config["chat_template"] == "J"


def test_dummy_weights_need_no_weight_files(folder: HuggingFaceFolder, tmp_path: Path) -> None:
    (folder.path / "model.safetensors").unlink()
    assert refusal(folder.path, tmp_path).reason == "WEIGHTS_MISSING"
    opened = open_model(str(folder.path), cache_dir=tmp_path, need_weights=False)
    assert opened.weights is None
    assert opened.weights_version.startswith("config-")


def test_a_truncated_weight_file_is_named_with_its_size_and_the_size_needed(
    folder: HuggingFaceFolder, tmp_path: Path
) -> None:
    folder.shard()
    file = folder.path / "two.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - 10)
    message = refusal(folder.path, tmp_path).message
    assert str(file) in message
    assert f"has {whole - 10} bytes" in message
    assert f"need {whole}" in message


def test_a_weight_file_that_ends_within_its_header_is_truncated(
    folder: HuggingFaceFolder, tmp_path: Path
) -> None:
    os.truncate(folder.path / "model.safetensors", 100)
    assert refusal(folder.path, tmp_path).reason == "WEIGHTS_TRUNCATED"


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, struct.pack("<Q", 10) + b"not json!!"])
def test_a_weight_file_that_is_none_is_refused(
    folder: HuggingFaceFolder, tmp_path: Path, content: bytes
) -> None:
    (folder.path / "model.safetensors").write_bytes(content)
    assert refusal(folder.path, tmp_path).reason in {"WEIGHTS_DAMAGED", "WEIGHTS_TRUNCATED"}


def test_a_missing_shard_is_named(folder: HuggingFaceFolder, tmp_path: Path) -> None:
    folder.shard()
    (folder.path / "two.safetensors").unlink()
    assert "two.safetensors" in refusal(folder.path, tmp_path).message


def test_weights_in_a_type_that_we_do_not_read_are_refused(folder: HuggingFaceFolder, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {**folder.tensors, "model.norm.weight": np.ones(32, dtype=np.int8)}
    save_file(tensors, folder.path / "model.safetensors")
    message = refusal(folder.path, tmp_path).message
    assert "model.norm.weight" in message
    assert "I8" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel; supported: LlamaForCausalLM"),
        ({"architectures": None}, "none; supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"vocab_size": 51}, "model.embed_tokens.weight"),
    ],
)
def test_a_config_that_we_do_not_run_is_refused_by_name(
    folder: HuggingFaceFolder, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder.write("config.json", {**CONFIG, **change})
    assert words in refusal(folder.path, tmp_path).message


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(
    folder: HuggingFaceFolder, tmp_path: Path, content: str
) -> None:
    (folder.path / "config.json").write_text(content)
    assert refusal(folder.path, tmp_path).reason == "CONFIG_DAMAGED"


def test_a_folder_without_a_tokenizer_is_refused(folder: HuggingFaceFolder, tmp_path: Path) -> None:
    (folder.path / "tokenizer.json").unlink()
    assert refusal(folder.path, tmp_path).reason == "TOKENIZER_MISSING"


@pytest.mark.parametrize("reference", ["", "  ", "/no/such/model", "no-such-name", "..x", "a/b"])
def test_a_reference_that_leads_nowhere_is_refused(tmp_path: Path, reference: str) -> None:
    assert refusal(reference, tmp_path).reason == "MODEL_NOT_FOUND"


def test_a_model_that_could_be_pulled_is_offered(tmp_path: Path) -> None:
    assert "chipmesh pull smollm2-135m" in refusal("smollm2-135m", tmp_path).message


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    assert refusal(tmp_path, tmp_path).reason == "MODEL_NOT_FOUND"


def test_the_cache_folder_is_read_from_the_environment_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHIPMESH_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert default_cache_dir() == Path("/one")
    monkeypatch.delenv("CHIPMESH_CACHE_DIR")
    assert default_cache_dir() == Path("/two/chipmesh")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "chipmesh"


def test_of_two_publishers_the_first_stays_and_nothing_is_left_behind(tmp_path: Path) -> None:
    target = tmp_path / "store" / "thing"

    def build(folder: Path, text: str) -> None:
        (folder / "file").write_text(text)

    def build_second(folder: Path) -> None:
        build(folder, "second")
        publish_folder(target, build=lambda other: build(other, "first"))

    assert publish_folder(target, build=build_second) == target
    assert (target / "file").read_text() == "first"
    assert [path.name for path in target.parent.iterdir()] == ["thing"]


def test_a_publisher_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        publish_folder(tmp_path / "thing", build=build)
    assert list(tmp_path.iterdir()) == []
