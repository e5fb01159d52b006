"""`chipmesh keys new`, and the key and the certificate on the way to a gateway."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from gateway.api_keys import KeyRing
from gateway.config import ApiKeyConfig
from gateway.key_files import read_keys
from meshkit.cli import main
from meshkit.cli.keys import new_key
from meshkit.config import parse_config
from meshkit.errors import InvalidArgument
from tests.contract.cli.conftest import ScriptedGateway, served
from tests.support.self_signed import write_self_signed

KEY = "cmk_a-key-of-a-test"


class ListeningGateway(ScriptedGateway):
    """Keeps the metadata of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.authorizations: list[list[Any]] = []
        self.events = [
            inference_pb2.GenerationEvent(accepted=inference_pb2.Accepted(request_id="r", model="m")),
            inference_pb2.GenerationEvent(
                finished=inference_pb2.Finished(reason=inference_pb2.Finished.REASON_STOP)
            ),
        ]

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[Any]:
        metadata = context.invocation_metadata()
        self.authorizations.append([value for name, value in metadata if name == "authorization"])
        yield from super().Generate(request, context)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHIPMESH_STATE_DIR", str(tmp_path))
    for name in ("CHIPMESH_API_KEY", "CHIPMESH_GATEWAY_AUTHORITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listening() -> Iterator[tuple[ListeningGateway, str]]:
    gateway = ListeningGateway()
    add = functools.partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, gateway)
    with served(add) as address:
        yield gateway, address


def test_a_new_key_is_shown_once_and_its_entry_lets_it_in(capsys: pytest.CaptureFixture[str]) -> None:
    new_key("team-a", requests_per_minute=5, share_cache=True, as_json=True)
    made = json.loads(capsys.readouterr().out)
    entry = parse_config(ApiKeyConfig, made["entry"], source="test")
    assert (entry.name, entry.requests_per_minute, entry.tokens_per_minute) == ("team-a", 5, None)
    assert entry.share_cache
    ring = KeyRing(checks_keys=True)
    ring.replace(read_keys([entry], None))
    assert ring.identify([f"Bearer {made['key']}"]).name == "team-a"
    assert made["key"] not in json.dumps(made["entry"])


@pytest.mark.parametrize(
    ("name", "is_good"),
    [
        ("a", True), ("9.team_A-b", True), ("x" * 64, True), ("x" * 65, False), ("", False), ("-a", False),
        ("a b", False), ("ä", False), ("a\n", False), ('a"}', False),
    ],
)  # fmt: skip
def test_a_name_is_good_here_where_it_is_at_the_gateway(
    name: str, is_good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def at_the_gateway() -> None:
        parse_config(ApiKeyConfig, {"name": name, "sha256": "0" * 64}, source="test")

    for check in (at_the_gateway, lambda: new_key(name)):
        if is_good:
            check()
        else:
            with pytest.raises(InvalidArgument):
                check()
    assert bool(capsys.readouterr().out) is is_good


def test_keys_are_long_random_and_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    keys = set()
    for _ in range(20):
        new_key("team-a")
        told = capsys.readouterr()
        (key,) = told.out.splitlines()
        assert len(key) >= 43
        assert key.isascii()
        entry = json.loads(told.err.splitlines()[-1])
        assert entry == {"name": "team-a", "sha256": hashlib.sha256(key.encode()).hexdigest()}
        assert key not in told.err
        keys.add(key)
    assert len(keys) == 20


def test_the_key_of_the_environment_is_sent(
    listening: tuple[ListeningGateway, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, address = listening
    assert main(["generate", "Why?", "--gateway", address]) == 0
    monkeypatch.setenv("CHIPMESH_API_KEY", f"{KEY}\n")
    assert main(["generate", "Why?", "--gateway", address]) == 0
    assert gateway.authorizations == [[], [f"Bearer {KEY}"]]


@pytest.mark.parametrize("broken", [f"{KEY}ß", f"{KEY}\n{KEY}"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHIPMESH_API_KEY", broken)
    assert main(["generate", "Why?", "--gateway", "127.0.0.1:1"]) == 1
    told = capsys.readouterr()
    assert "CHIPMESH_API_KEY" in told.err
    assert KEY not in told.out + told.err


@contextlib.contextmanager
def _served_in_tls(gateway: ListeningGateway, folder: Path) -> Iterator[str]:
    certificate = write_self_signed(folder)
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    credentials = grpc.ssl_server_credentials([((folder / "key.pem").read_bytes(), certificate)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_gateway_with_a_certificate_is_asked_in_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = ListeningGateway()
    monkeypatch.setenv("CHIPMESH_API_KEY", KEY)
    with _served_in_tls(gateway, tmp_path) as address:
        monkeypatch.setenv("CHIPMESH_GATEWAY_AUTHORITY", str(tmp_path / "certificate.pem"))
        assert main(["generate", "Why?", "--gateway", address]) == 0
        (tmp_path / "other").mkdir()
        write_self_signed(tmp_path / "other")
        monkeypatch.setenv("CHIPMESH_GATEWAY_AUTHORITY", str(tmp_path / "other" / "certificate.pem"))
        assert main(["generate", "Why?", "--gateway", address]) == 1
        monkeypatch.setenv("CHIPMESH_GATEWAY_AUTHORITY", "system")
        assert main(["generate", "Why?", "--gateway", address]) == 1
        monkeypatch.setenv("CHIPMESH_GATEWAY_AUTHORITY", str(tmp_path / "none"))
        assert main(["generate", "Why?", "--gateway", address]) == 1
    assert "CHIPMESH_GATEWAY_AUTHORITY" in capsys.readouterr().err.splitlines()[-1]
    assert gateway.authorizations == [[f"Bearer {KEY}"]]


def test_a_key_for_an_operator_says_so_in_its_entry_and_any_other_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for operator in (True, False):
        new_key("boss", operator=operator, as_json=True)
        entry = json.loads(capsys.readouterr().out)["entry"]
        assert ("operator" in entry) is operator
        assert parse_config(ApiKeyConfig, entry, source="entry").operator is operator
