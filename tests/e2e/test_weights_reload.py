"""Other weights under the same worker id: what was cached of the old ones is never used again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import Generation, RunningMesh, running_mesh, token_request
from worker_svc.weights import DummyWeights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PROMPT = [(7 * position) % VOCAB_SIZE for position in range(70)]


def write_weights(folder: Path, *, seed: int) -> Path:
    """A small Llama with random weights, spread well apart so that greedy tokens are no near ties."""
    folder.mkdir()
    config = json.loads((write_hash_model(folder) / "config.json").read_text(encoding="utf-8"))
    weights = DummyWeights({**config, "attention_bias": False, "mlp_bias": False}, seed=seed)
    save_file({name: weights.read(name) * 12 for name in weights.names()}, folder / "model.safetensors")
    return folder


def up(state: Path, model: Path) -> tuple[str, ...]:
    state.mkdir()
    return ("--model-path", str(model), "--served-model-name", "m", "--dtype", "float32", "--page-size", "16")


def ask(mesh: RunningMesh) -> Generation:
    return mesh.client.generate(token_request(PROMPT, max_tokens=12))


def cached(answer: Generation) -> int:
    assert answer.finished is not None
    return int(answer.finished.usage.cached_tokens)


def test_a_reload_drops_the_cache_and_answers_as_a_cold_start_with_the_new_weights(tmp_path: Path) -> None:
    old, new = (write_weights(tmp_path / name, seed=seed) for name, seed in (("old", 3), ("new", 4)))
    with running_mesh(tmp_path / "cold", *up(tmp_path / "cold", new)) as cold:
        expected = ask(cold)
    with running_mesh(tmp_path / "warm", *up(tmp_path / "warm", old)) as mesh:
        before = ask(mesh)
        assert before.token_ids != expected.token_ids
        assert cached(ask(mesh)) == 64
        mesh.cli_json("swap", "worker-0", "--model-path", str(new))
        after = ask(mesh)
        assert (after.token_ids, cached(after)) == (expected.token_ids, 0)
        mesh.cli_json("swap", "worker-0")
        again = ask(mesh)
        assert (again.token_ids, cached(again)) == (expected.token_ids, 0)
        assert cached(ask(mesh)) == 64
