"""`chipmesh tune` on chips whose best settings are known: it finds them, and `up` starts what it wrote."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.up import read_groups
from tests.support.hash_model import write_hash_model
from tests.support.mesh import RunningMesh, run_cli, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

# A step takes 5 ms whatever is in it: the best chunk and batch are those of which a load needs fewest steps.
CHIP = ("--backend", "hash", "--load-format", "dummy", "--backend-option", "step_ms=5")
LOAD = (
    "--max-concurrency",
    "4",
    "--num-prompts",
    "12",
    "--random-input-len",
    "64",
    "--random-output-len",
    "4",
)
SEARCH = ("--try-chunked-prefill-size", "256", "--try-max-running-requests", "4", "--rounds", "4")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return write_hash_model(folder)


def ceilings(mesh: RunningMesh) -> tuple[int, int]:
    (replica,) = mesh.replicas()
    return replica["chunk_tokens"], replica["max_running_requests"]


def tune_own_mesh(model: Path, file: Path, state_dir: Path) -> Any:
    """From the worst chunk and batch; what it told."""
    done = run_cli(
        "tune", "--model-path", str(model), *CHIP, *LOAD, *SEARCH, "--try-step-window", "none",
        "--chunked-prefill-size", "16", "--max-running-requests", "1", "--budget", "60",
        "--output", str(file), "--json", state_dir=state_dir,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_the_best_of_known_chips_is_found_on_a_mesh_of_its_own_and_written(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "groups.json"
    told = tune_own_mesh(model, file, tmp_path / "none")
    assert told["default"] == {"chunked_prefill_size": 16, "max_running_requests": 1}
    assert (told["chosen"]["chunked_prefill_size"], told["chosen"]["max_running_requests"]) == (256, 4), told
    assert told["gain"] > told["noise"]
    (group,) = read_groups(file)
    assert (group.devices, group.chunked_prefill_size, group.max_running_requests) == ("hash:0", 256, 4)


@pytest.mark.nightly
def test_what_was_written_is_what_up_starts(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    tune_own_mesh(model, file, tmp_path / "none")
    with running_mesh(tmp_path / "state", "--groups-file", str(file)) as mesh:
        assert ceilings(mesh) == (256, 4)


@pytest.mark.nightly
def test_a_window_is_tried_by_starting_the_mesh_anew(model: Path, tmp_path: Path) -> None:
    done = run_cli(
        "tune", "--model-path", str(model), *CHIP, *LOAD, "--rounds", "4", "--budget", "100", "--json",
        "--try-chunked-prefill-size", "none", "--try-max-running-requests", "none",
        "--try-step-window", "0,0.5", state_dir=tmp_path / "none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["settings"]
    assert {row["step_window_s"] for row in rows if row["output_tokens_per_s"]} == {None, 0.0, 0.5}


@pytest.fixture
def mesh(model: Path, tmp_path: Path) -> Any:
    flags = ("--chunked-prefill-size", "256", "--max-running-requests", "4")
    with running_mesh(tmp_path / "state", "--model-path", str(model), *CHIP, *flags) as mesh:
        mesh.cli_json(
            "group", "set", "default", "--chunked-prefill-size", "16", "--max-running-requests", "1"
        )
        yield mesh


@pytest.mark.nightly
def test_a_running_group_goes_on_with_what_was_found(mesh: RunningMesh) -> None:
    told = mesh.cli_json("tune", "--group", "default", *LOAD, *SEARCH, "--budget", "60")
    assert told["chosen"]["max_running_requests"] == 4, told
    assert ceilings(mesh) == (256, 4)


@pytest.mark.nightly
def test_an_interrupted_search_leaves_a_running_group_as_it_was(mesh: RunningMesh, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "meshkit.cli", "tune", "--group", "default", *LOAD, "--budget", "500"]
    environment = {"CHIPMESH_STATE_DIR": str(mesh.state_dir)}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while ceilings(mesh)[0] in (16, 256):
        assert time.monotonic() < deadline, "no candidate was applied"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert ceilings(mesh) == (16, 1)
