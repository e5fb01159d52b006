"""An executor under an interpreter of its own, one without torch, beside services that run under ours."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from plugins.hash.oracle import continue_tokens
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import RunningMesh, running_mesh, token_request
from worker_svc.executor.settings import ExecutorSettings
from worker_svc.executor_process import ExecutorFailed, spawn_executor

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TORCH_PARTS = ("torch", "functorch")
"""Beginnings of the names of all that torch installs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hash_model(tmp_path_factory.mktemp("hash-model"))


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has all that ours has, by links, except torch; returns its python."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    # Copies: by /proc a linked interpreter could not be told from ours.
    run(sys.executable, "-m", "venv", "--without-pip", "--copies", str(folder))
    python = folder / "bin" / "python"
    target = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in ("purelib", "platlib"):
        for installed in Path(sysconfig.get_path(name)).iterdir():
            link = target / installed.name
            if not installed.name.startswith(TORCH_PARTS) and not link.exists():
                link.symlink_to(installed)
    return python


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, interpreter: Path, model: Path) -> Iterator[RunningMesh]:
    state_dir = tmp_path_factory.mktemp("mesh")
    with running_mesh(
        state_dir, "--backend", "hash", "--model-path", str(model), "--load-format", "dummy",
        "--executor-python", str(interpreter),
    ) as mesh:  # fmt: skip
        yield mesh


def run(*command: str) -> str:
    """The output of a command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def executable(pid: int) -> Path:
    """The file that a process runs, links resolved."""
    return Path(f"/proc/{pid}/exe").readlink()


def test_the_other_interpreter_has_no_torch(interpreter: Path) -> None:
    code = "import worker_svc.executor.app, importlib.util; print(importlib.util.find_spec('torch'))"
    assert run(str(interpreter), "-c", code).strip() == "None"
    assert version("torch"), "without torch on our side this would show nothing"


def test_the_executor_runs_under_the_interpreter_it_was_given(mesh: RunningMesh, interpreter: Path) -> None:
    (worker,) = mesh.description["workers"]
    assert executable(worker["executor_pid"]) == interpreter
    assert executable(worker["pid"]) == Path(sys.executable).resolve(), "its supervisor runs under ours"
    mapped = Path(f"/proc/{worker['executor_pid']}/maps").read_text(encoding="utf-8")
    assert "grpc" in mapped
    assert "torch" not in mapped


def test_tokens_from_the_other_interpreter_are_exact(mesh: RunningMesh) -> None:
    prompt = [(5 * position) % VOCAB_SIZE for position in range(90)]
    answer = mesh.client.generate(token_request(prompt, max_tokens=100))
    assert answer.token_ids == continue_tokens(prompt, 100, VOCAB_SIZE)
    assert answer.finish_reason == "length"


async def test_a_plugin_that_lacks_torch_there_is_refused_with_the_way_out(interpreter: Path) -> None:
    settings = ExecutorSettings(backend="cpu", instance_id="without-torch")
    with pytest.raises(ExecutorFailed) as refused:
        await spawn_executor(settings, python=str(interpreter), environment={}, timeout_s=60)
    for word in ("'cpu'", "'torch'", "executor.python"):
        assert word in refused.value.message
