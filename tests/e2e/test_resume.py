"""A gateway is lost under streams, by SIGKILL or SIGTERM: clients go on at another with what they have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from meshkit.errors import MeshError, Unavailable, from_rpc_error
from plugins.hash.oracle import continue_tokens
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import MeshClient, assert_page_identity, run_cli, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

STREAMS = 8
TOKENS = 300


class Services:
    """One scheduler, one hash worker, two gateways; each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        model = str(write_hash_model(folder))
        self.scheduler = self.start("scheduler", "scheduler")["address"]
        served = [{"name": "hash", "path": model, "load_format": "dummy"}]
        self.gateways = [
            self.start(name, "gateway", scheduler_address=self.scheduler, models=served, drain_grace_s=0.2)[
                "address"
            ]
            for name in ("gateway-a", "gateway-b")
        ]
        self.start(
            "worker", "worker", scheduler_address=self.scheduler, worker_id="w0", model="hash",
            model_path=model, load_format="dummy", backend="hash", backend_options={"step_ms": "4"},
        )  # fmt: skip

    def start(self, name: str, kind: str, **config: Any) -> dict[str, Any]:
        """Start a service; what it wrote into its ready file."""
        ready, file = self.folder / f"{name}-ready.json", self.folder / f"{name}.json"
        file.write_text(json.dumps({"ready_file": str(ready), **config}), encoding="utf-8")
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "meshkit.cli", kind, "--config", str(file)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert self.running[name].poll() is None, (self.folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline, f"{name} was not ready in time"
            time.sleep(0.02)
        content: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
        return content

    def end(self, name: str, number: signal.Signals) -> int:
        """Send a signal and wait for the process to be gone; its exit code."""
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(timeout=30)

    def wait_until_idle(self) -> list[dict[str, Any]]:
        """The scheduler's replicas once no page is held."""
        deadline = time.monotonic() + 10
        while True:
            status = run_cli("status", "--endpoint", self.scheduler, "--json", state_dir=self.folder)
            assert status.returncode == 0, status.stderr
            replicas: list[dict[str, Any]] = [
                replica for group in json.loads(status.stdout)["groups"] for replica in group["replicas"]
            ]
            if replicas and not any(r["running"] + r["waiting"] + r["pages"]["held"] for r in replicas):
                return replicas
            assert time.monotonic() < deadline, replicas


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    codes = {name: services.end(name, signal.SIGTERM) for name in sorted(services.running)}
    assert not any(codes.values()), f"exit codes {codes}"


class Client:
    """Follows one generation over gateways, as a client of any language would: from messages alone."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.text = ""
        self.finished: pb.Finished | None = None
        self.lost: MeshError | None = None

    def follow(self, client: MeshClient, far_enough: threading.Event | None = None) -> None:
        """Read to the end, or to the loss of the gateway."""
        text_behind = ""
        try:
            for event in client.stream(self.request):
                kind = event.WhichOneof("kind")
                if kind == "accepted":
                    self.request.request_id = event.accepted.request_id
                    self.request.sampling.CopyFrom(event.accepted.effective_sampling)
                elif kind == "output" and event.output.token_ids:
                    assert event.output.first_index == len(self.token_ids), "a token was lost or repeated"
                    self.token_ids.extend(event.output.token_ids)
                    self.text += event.output.text
                elif kind == "output":
                    text_behind = event.output.text
                else:
                    self.finished = event.finished
                    self.text += text_behind
                if far_enough is not None and len(self.token_ids) > TOKENS // 10:
                    far_enough.set()
        except grpc.RpcError as error:
            # Errors of the synchronous client have what that of the asynchronous one has.
            self.lost = from_rpc_error(cast("grpc.aio.AioRpcError", error))

    def go_on(self, client: MeshClient) -> None:
        """Send the same again with what came."""
        self.request.output_token_ids[:] = self.token_ids
        self.follow(client)


def requests() -> list[pb.GenerateRequest]:
    """Half of them greedy, half drawn: the hash model has one token for either, but seeds two rules."""
    return [
        token_request([index, 1, 2, 3], max_tokens=TOKENS, temperature=0.0 if index % 2 else 1.0)
        for index in range(STREAMS)
    ]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)],
    ids=["killed", "drained"],
)
def test_clients_of_a_lost_gateway_go_on_at_another(services: Services, number: signal.Signals) -> None:
    first, second = (MeshClient(address) for address in services.gateways)
    clients = [Client(request) for request in requests()]
    far_enough = [threading.Event() for _ in clients]
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = list(pool.map(second.generate, requests()))
        following = [
            pool.submit(c.follow, first, event) for c, event in zip(clients, far_enough, strict=True)
        ]
        assert all(event.wait(30) for event in far_enough)
        code = services.end("gateway-a", number)
        for each in following:
            each.result()
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    for client in clients:
        assert client.finished is None, "no stream was disturbed, so this test has shown nothing"
        assert isinstance(client.lost, Unavailable)
        if number is signal.SIGTERM:
            assert client.lost.reason == "DRAINING"
            assert client.lost.metadata["retry_after_s"] == "1.0"
            assert "another gateway, with the tokens that came in output_token_ids" in client.lost.message
        assert TOKENS // 10 < len(client.token_ids) < TOKENS
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda client: client.go_on(second), clients))
    for index, (client, whole) in enumerate(zip(clients, undisturbed, strict=True)):
        assert client.token_ids == continue_tokens([index, 1, 2, 3], TOKENS, VOCAB_SIZE)
        assert client.text == whole.text
        assert client.finished is not None
        assert client.finished.reason == pb.Finished.REASON_LENGTH
        assert client.finished.usage.completion_tokens == TOKENS
    first.close()
    second.close()
    assert_page_identity(services.wait_until_idle())


def test_the_command_goes_on_by_itself_when_its_gateway_is_killed(services: Services) -> None:
    command = [
        sys.executable, "-m", "meshkit.cli", "generate", "abc", "--raw", "--max-tokens", str(TOKENS),
        "--temperature", "0", "--gateway", ",".join(services.gateways),
    ]  # fmt: skip
    environment = {**os.environ, "CHIPMESH_STATE_DIR": str(services.folder)}
    # Unbuffered: `communicate` would not find what a buffer had taken in beyond the first bytes.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    begun = process.stdout.read(10)
    assert services.end("gateway-a", signal.SIGKILL) == -signal.SIGKILL
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert f"at {services.gateways[1]} (try 1 of at most".encode() in said
    whole = subprocess.run(
        [*command[:-1], services.gateways[1]], env=environment, stdout=subprocess.PIPE, check=True
    )
    assert begun + rest == whole.stdout


def test_draws_penalties_and_logprobs_of_a_real_model_go_on_where_they_were(tmp_path: Path) -> None:
    model = str(write_hash_model(tmp_path))
    with running_mesh(
        tmp_path, "--backend", "cpu", "--model-path", model, "--load-format", "dummy", "--dtype", "float32"
    ) as mesh:
        asked = token_request(
            [5, 6, 7], max_tokens=40, seed=7, temperature=0.9, top_p=0.95, repetition_penalty=1.3,
            presence_penalty=0.5, frequency_penalty=0.5,
        )  # fmt: skip
        asked.stop.min_tokens = 30
        asked.stop.stop_token_ids.extend(range(0, VOCAB_SIZE, 4))
        asked.logprobs = True
        events = list(mesh.client.stream(asked))
        whole = [token for event in events for token in event.output.token_ids]
        logprobs = [each for event in events for each in event.output.logprobs]
        assert 30 <= len(whole) < 40, (
            "no end token came after min_tokens, so this test shows less than it says"
        )
        asked.sampling.CopyFrom(events[0].accepted.effective_sampling)
        for cut in (1, 13, 29, len(whole) - 1, len(whole)):
            asked.output_token_ids[:] = whole[:cut]
            again = list(mesh.client.stream(asked))
            assert whole[:cut] + [token for event in again for token in event.output.token_ids] == whole
            rest = [each for event in again for each in event.output.logprobs]
            assert rest == pytest.approx(logprobs[cut:], abs=1e-3)
            assert again[-1].finished.reason == pb.Finished.REASON_STOP
            assert again[-1].finished.usage.completion_tokens == len(whole)
        assert_page_identity(mesh.wait_until_idle())
