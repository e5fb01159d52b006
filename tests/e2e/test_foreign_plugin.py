"""A plugin from outside this tree: the template is copied out, packed, installed elsewhere, and serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from hatchling.builders.wheel import WheelBuilder

from chipmesh.device.v1alpha1 import plugin_pb2, plugin_pb2_grpc
from plugins.sdk.registry import list_backends
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import RunningMesh, run_cli, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "plugins" / "template"
PROMPTS = ([1, 2, 3], [200, 7, 7, 91, 13], [(11 * position) % VOCAB_SIZE for position in range(70)])
COUNT = 24
ATTEMPTS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama of the hash tests, wide enough that random weights do more than echo the last token."""
    folder = write_hash_model(tmp_path_factory.mktemp("tiny-llama"))
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"hidden_size": 256, "intermediate_size": 1024, "tie_word_embeddings": False}
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `pip install` filled from a copy of the template."""
    folder = tmp_path_factory.mktemp("foreign-plugin")
    copy, wheels, target = folder / "my-chip", folder / "wheels", folder / "site"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(wheels), str(copy))
    pip("install", "--target", str(target), *map(str, wheels.glob("*.whl")))
    return target


def pip(command: str, *arguments: str) -> None:
    """pip without dependencies and without any index."""
    line = [sys.executable, "-m", "pip", command, "--no-deps", "--no-index", "--quiet", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def on_path(installed: Path) -> Iterator[None]:
    """What is started from here on finds the installed plugin."""
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, on_path: None, model: Path) -> Iterator[RunningMesh]:
    """Two groups for one model: the foreign chip and the host's own, with the same random weights."""
    with running_mesh(
        tmp_path_factory.mktemp("mesh"), "--backend", "example", "--device-groups", "example:0;cpu:0",
        "--model-path", str(model), "--load-format", "dummy", "--dtype", "float32",
        "--max-total-tokens", "2048",
    ) as mesh:  # fmt: skip
        yield mesh


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]


def ask(mesh: RunningMesh, prompt: list[int]) -> tuple[str, Answer]:
    """The chip that answered, and what."""
    request = token_request(prompt, max_tokens=COUNT)
    request.logprobs = True
    events = list(mesh.client.stream(request))
    outputs = [event.output for event in events if event.HasField("output")]
    token_ids = [token for output in outputs for token in output.token_ids]
    logprobs = [value for output in outputs for value in output.logprobs]
    return events[-1].finished.placement.chip, Answer(token_ids, logprobs)


def ask_both(mesh: RunningMesh, prompt: list[int]) -> tuple[Answer, Answer]:
    """The answers of example and cpu: asks until both groups, which share the traffic, had their turn."""
    answers: dict[str, Answer] = {}
    for _ in range(ATTEMPTS):
        chip, answer = ask(mesh, prompt)
        answers[chip] = answer
        if len(answers) == 2:
            return answers["example"], answers["cpu"]
    raise AssertionError(f"{ATTEMPTS} requests all went to {list(answers)}")


def test_the_copy_serves_what_the_cpu_plugin_serves(mesh: RunningMesh) -> None:
    pairs = [ask_both(mesh, prompt) for prompt in PROMPTS]
    assert len({token for ours, _ in pairs for token in ours.token_ids}) > 20, "too dull to tell chips apart"
    for ours, theirs in pairs:
        assert ours.token_ids == theirs.token_ids
        assert len(ours.logprobs) == COUNT
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_status_says_which_chip_is_the_foreign_one(mesh: RunningMesh) -> None:
    seen = {(replica["chip"], replica["emulated"], replica["state"]) for replica in mesh.replicas()}
    assert seen == {("example", True, "ready"), ("cpu", False, "ready")}


def test_the_executor_runs_one_operator_of_the_plugin_and_the_rest_on_the_reference(
    mesh: RunningMesh, installed: Path
) -> None:
    # Workers are numbered in the order of the device groups.
    worker = next(each for each in mesh.description["workers"] if each["worker"] == "worker-0")
    with grpc.insecure_channel(worker["executor_address"]) as channel:
        stub = plugin_pb2_grpc.PluginServiceStub(channel)
        report = stub.GetCapabilities(plugin_pb2.GetCapabilitiesRequest(), timeout=10).report
        info = stub.GetPluginInfo(plugin_pb2.GetPluginInfoRequest(), timeout=10)
    native = plugin_pb2.OperatorCapability.COVERAGE_NATIVE
    assert [operator.name for operator in report.operators if operator.coverage == native] == ["silu_mul"]
    assert len(report.operators) > 1
    (metadata,) = installed.glob("chipmesh_example_chip-*.dist-info")
    assert metadata.name == f"chipmesh_example_chip-{info.plugin_version}.dist-info"


@pytest.mark.usefixtures("on_path")
def test_the_copy_passes_conformance(tmp_path: Path) -> None:
    done = run_cli("conformance", "--backend", "example", "--quick", "--json", state_dir=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["fail"] == 0
    assert report["pass"] > 0
    assert list(report["coverage"]["operators"]) == ["silu_mul"]


def test_the_template_is_no_part_of_chipmesh() -> None:
    packed = [file.relative_path for file in WheelBuilder(str(ROOT)).recurse_included_files()]
    assert "plugins/cpu/plugin.py" in packed
    assert [path for path in packed if path.startswith("plugins/template")] == []
    assert "example" not in [backend.name for backend in list_backends()]
