"""Models by their ids on the hub: a pull fetches them (a server here stands in for it), then ids open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from meshkit.errors import InvalidArgument
from meshkit.modelstore import open_model, tensor_shapes
from tests.unit.modelstore.hub_stand_in import HubStandIn, serve

REPO = "acme/Tiny-1.5B"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": 50,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def files_of(config: dict[str, Any]) -> dict[str, bytes]:
    tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in tensor_shapes(CONFIG).items()}
    first = {name: values for name, values in tensors.items() if name.startswith("model.layers")}
    rest = {name: values for name, values in tensors.items() if name not in first}
    return {
        "README.md": b"# Tiny",
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model-00001-of-00002.safetensors": save(first),
        "model-00002-of-00002.safetensors": save(rest),
        "onnx/model.safetensors": b"another form",
        "pytorch_model.bin": b"a pickle",
    }


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with serve(HubStandIn(REPO, files_of(CONFIG))) as running:
        yield running


def pull(name: str, cache_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`chipmesh pull`, in a process of its own: the hub's library reads HF_ENDPOINT when it is imported."""
    command = [sys.executable, "-m", "meshkit.cli", "pull", name, "--json"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    variables = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CHIPMESH_CACHE_DIR": str(cache_dir),
        "HF_HOME": str(cache_dir / "hf"),
        **environment,
    }
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**kept, **variables})


def test_a_pulled_id_opens_under_its_own_name(hub: HubStandIn, tmp_path: Path) -> None:
    done = pull(REPO, tmp_path, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == REPO
    folder = open_model(REPO, cache_dir=tmp_path)
    assert folder.name == REPO
    assert folder.tokenizer_config["chat_template"] == "{{ messages }}"
    assert folder.weights is not None
    assert len(folder.weights.files) == 2
    present = {file.name for file in folder.source.iterdir()}
    assert present == set(hub.files) - {"README.md", "onnx/model.safetensors", "pytorch_model.bin"}


def test_a_second_pull_asks_nobody(hub: HubStandIn, tmp_path: Path) -> None:
    assert pull(REPO, tmp_path, HF_ENDPOINT=hub.url).returncode == 0
    hub.paths.clear()
    assert pull(REPO, tmp_path, HF_ENDPOINT=hub.url).returncode == 0
    assert not any(REPO in path for path in hub.paths)


def test_a_pull_that_failed_leaves_no_model_and_the_next_one_goes_on(hub: HubStandIn, tmp_path: Path) -> None:
    first, second = (name for name in hub.files if name.startswith("model-"))
    hub.broken.add(second)
    assert pull(REPO, tmp_path, HF_ENDPOINT=hub.url).returncode != 0
    with pytest.raises(InvalidArgument):
        open_model(REPO, cache_dir=tmp_path)
    hub.broken.clear()
    assert pull(REPO, tmp_path, HF_ENDPOINT=hub.url).returncode == 0
    assert (hub.sent.count(first), hub.sent.count(second)) == (1, 1)
    assert open_model(REPO, cache_dir=tmp_path).weights is not None


def test_a_model_that_we_do_not_run_costs_its_configuration_only(hub: HubStandIn, tmp_path: Path) -> None:
    hub.files["config.json"] = json.dumps({**CONFIG, "architectures": ["Mamba2ForCausalLM"]}).encode()
    done = pull(REPO, tmp_path, HF_ENDPOINT=hub.url)
    assert done.returncode != 0
    assert "Mamba2ForCausalLM" in done.stderr
    assert "Qwen3ForCausalLM" in done.stderr
    assert not any("safetensors" in path for path in hub.paths)


def test_an_unknown_id_and_a_repository_without_safetensors_are_told_apart(
    hub: HubStandIn, tmp_path: Path
) -> None:
    unknown = pull("acme/nothing", tmp_path, HF_ENDPOINT=hub.url)
    assert "HF_TOKEN" in unknown.stderr
    for name in [name for name in hub.files if name.endswith("safetensors")]:
        del hub.files[name]
    bare = pull(REPO, tmp_path, HF_ENDPOINT=hub.url)
    assert "pytorch_model.bin" in bare.stderr
    assert unknown.returncode != 0
    assert bare.returncode != 0


@pytest.mark.parametrize("setting", ["closed port", "offline"])
def test_a_hub_out_of_reach_is_refused_with_the_way_out(tmp_path: Path, setting: str) -> None:
    with serve(HubStandIn(REPO, {})) as gone:
        pass
    variables = {"HF_HUB_OFFLINE": "1"} if setting == "offline" else {}
    done = pull(REPO, tmp_path, HF_ENDPOINT=gone.url, **variables)
    assert done.returncode != 0
    assert "HF_ENDPOINT" in done.stderr
    assert "path" in done.stderr
    assert not any((tmp_path / "models").glob("*"))


def test_an_id_that_is_not_pulled_is_refused_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"`chipmesh pull acme/Tiny-1\.5B` fetches it"):
        open_model(REPO, cache_dir=tmp_path)
