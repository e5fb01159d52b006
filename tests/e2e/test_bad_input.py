"""Bad input ends in one clear error that names the field; nothing dies, and the next request works."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import RunningMesh, run_cli, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    folder = tmp_path_factory.mktemp("bad-input")
    model = write_hash_model(folder)
    with running_mesh(
        folder / "state", "--backend", "hash", "--model-path", str(model), "--load-format", "dummy"
    ) as mesh:
        yield mesh


def _request(change: str) -> inference_pb2.GenerateRequest:
    request = token_request([1, 2, 3], max_tokens=4)
    if change == "empty":
        del request.prompt.tokens.token_ids[:]
    elif change == "empty text":
        request.prompt.text = ""
    elif change == "too long":
        request.prompt.tokens.token_ids.extend([1] * 5000)
    elif change == "vocabulary":
        request.prompt.tokens.token_ids.append(VOCAB_SIZE)
    elif change == "max_tokens 0":
        request.stop.max_tokens = 0
    elif change == "max_tokens -1":
        request.stop.max_tokens = -1
    elif change == "temperature -1":
        request.sampling.temperature = -1
    elif change == "temperature NaN":
        request.sampling.temperature = math.nan
    elif change == "model":
        request.model = "no-such-model"
    return request


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("empty", grpc.StatusCode.INVALID_ARGUMENT, ["prompt"]),
        ("empty text", grpc.StatusCode.INVALID_ARGUMENT, ["prompt"]),
        ("too long", grpc.StatusCode.INVALID_ARGUMENT, ["prompt", "4096", "5003"]),
        ("vocabulary", grpc.StatusCode.INVALID_ARGUMENT, ["prompt", str(VOCAB_SIZE)]),
        ("max_tokens 0", grpc.StatusCode.INVALID_ARGUMENT, ["max_tokens", "0"]),
        ("max_tokens -1", grpc.StatusCode.INVALID_ARGUMENT, ["max_tokens", "-1"]),
        ("temperature -1", grpc.StatusCode.INVALID_ARGUMENT, ["temperature", "-1"]),
        ("temperature NaN", grpc.StatusCode.INVALID_ARGUMENT, ["temperature", "nan"]),
        ("model", grpc.StatusCode.NOT_FOUND, ["no-such-model"]),
    ],
)
def test_a_bad_request_names_its_field_and_the_next_one_works(
    mesh: RunningMesh, change: str, code: grpc.StatusCode, words: list[str]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        mesh.client.generate(_request(change))
    assert caught.value.code() is code
    details = caught.value.details() or ""
    for word in words:
        assert word in details
    assert len(mesh.client.generate(token_request([1, 2, 3], max_tokens=4)).token_ids) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "nonsense"), ["nonsense", "cpu", "hash"]),
        (("--model-path", "/no/such/model"), ["model", "/no/such/model"]),
        (("--schedule-policy", "nonsense"), ["nonsense", "fcfs", "lpm"]),
    ],
)
def test_a_mesh_that_cannot_start_says_why_and_leaves_nothing_running(
    tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    model = write_hash_model(tmp_path)
    base = (
        "up",
        "--detach",
        "--json",
        "--backend",
        "hash",
        "--model-path",
        str(model),
        "--load-format",
        "dummy",
    )
    failed = run_cli(*base, *arguments, state_dir=tmp_path / "state")
    assert failed.returncode != 0
    for word in words:
        assert word in failed.stdout + failed.stderr
    assert run_cli("status", state_dir=tmp_path / "state").returncode != 0


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    model = write_hash_model(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        failed = run_cli(
            "up", "--detach", "--backend", "hash", "--model-path", str(model), "--load-format", "dummy",
            "--port", port, state_dir=tmp_path / "state",
        )  # fmt: skip
    assert failed.returncode != 0
    assert port in failed.stdout + failed.stderr


def test_a_truncated_model_file_is_refused_by_name(tmp_path: Path) -> None:
    from meshkit.modelstore import default_cache_dir

    (whole,) = (default_cache_dir() / "models" / "smollm2-135m").glob("*.gguf")
    with whole.open("rb") as source:
        (tmp_path / "cut.gguf").write_bytes(source.read(4_000_000))
    failed = run_cli(
        "up", "--detach", "--model-path", str(tmp_path / "cut.gguf"), state_dir=tmp_path / "state"
    )
    assert failed.returncode != 0
    assert "cut.gguf" in failed.stdout + failed.stderr
