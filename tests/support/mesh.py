"""A real mesh for end-to-end tests: started and stopped by the command line, spoken to over real gRPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc


@dataclass
class Generation:
    """What a client saw of one stream."""

    accepted: inference_pb2.Accepted
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: inference_pb2.Finished | None = None
    messages: int = 0

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `cancelled`."""
        assert self.finished is not None, "the stream has not ended"
        return inference_pb2.Finished.Reason.Name(self.finished.reason).removeprefix("REASON_").lower()

    def add(self, event: inference_pb2.GenerationEvent) -> None:
        """Take one event in; checks that no token is lost or repeated."""
        kind = event.WhichOneof("kind")
        if kind == "output":
            assert event.output.first_index == len(self.token_ids), "a token was lost or repeated"
            self.token_ids.extend(event.output.token_ids)
            self.text += event.output.text
            self.messages += 1
        elif kind == "finished":
            assert self.finished is None, "two ends"
            self.finished = event.finished


def token_request(
    token_ids: Sequence[int], *, max_tokens: int, **sampling: Any
) -> inference_pb2.GenerateRequest:
    """A request by token ids; greedy unless told otherwise."""
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=token_ids)),
        sampling=inference_pb2.SamplingOptions(**{"temperature": 0.0, **sampling}),
        stop=inference_pb2.StopOptions(max_tokens=max_tokens),
    )


class MeshClient:
    """A plain client of a gateway."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def stream(self, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerationEvent]:
        """The events of one generation."""
        for response in self.stub.Generate(request, timeout=120):
            yield response.event

    def generate(self, request: inference_pb2.GenerateRequest) -> Generation:
        """One generation to its end; the first event must be `accepted`, the last `finished`."""
        events = self.stream(request)
        first = next(events)
        assert first.WhichOneof("kind") == "accepted", f"the first event is {first.WhichOneof('kind')}"
        generation = Generation(first.accepted)
        for event in events:
            assert generation.finished is None, "an event after the end"
            generation.add(event)
        assert generation.finished is not None, "the stream ended without a terminal event"
        return generation


def run_cli(*arguments: str, state_dir: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `chipmesh ARGUMENTS` as a user would, with a state folder of its own."""
    environment = {**os.environ, "CHIPMESH_STATE_DIR": str(state_dir), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "meshkit.cli", *arguments],
        env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


@dataclass
class RunningMesh:
    """A mesh that is up."""

    state_dir: Path
    description: dict[str, Any]
    client: MeshClient

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command against this mesh."""
        return run_cli(*arguments, state_dir=self.state_dir)

    def cli_json(self, *arguments: str) -> Any:
        """Run a command with `--json`; its single JSON document."""
        done = self.cli(*arguments, "--json")
        assert done.returncode == 0, f"chipmesh {' '.join(arguments)} failed: {done.stderr}{done.stdout}"
        return json.loads(done.stdout)

    def status(self) -> Any:
        """`chipmesh status --json`."""
        return self.cli_json("status")

    def replicas(self) -> list[dict[str, Any]]:
        """All replicas of all groups."""
        return [replica for group in self.status()["groups"] for replica in group["replicas"]]

    def scrape(self, service: str) -> str:
        """The metrics page of `gateway` or `scheduler`."""
        return _read_metrics(self.description[service]["http_address"])

    def scrape_worker(self, index: int) -> str:
        """The metrics page of a worker's supervisor."""
        return _read_metrics(self.description["workers"][index]["http_address"])

    def wait_until_idle(self, *, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """The replicas once nothing runs, waits or holds a page; AssertionError after `timeout_s`.

        A request that has ended holds its pages until the steps in flight are over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            replicas = self.replicas()
            if all(_is_idle(replica) for replica in replicas):
                return replicas
            assert time.monotonic() < deadline, f"not idle after {timeout_s} s: {replicas}"


def _read_metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
        return text


def _is_idle(replica: dict[str, Any]) -> bool:
    return bool(replica["running"] == replica["waiting"] == replica["pages"]["held"] == 0)


def assert_page_identity(replicas: Sequence[dict[str, Any]]) -> None:
    """`free + cached + held == total`, and nothing held, on replicas that are idle."""
    for replica in replicas:
        pages = replica["pages"]
        assert pages["free"] + pages["cached"] + pages["held"] == pages["total"], pages
        assert pages["held"] == 0, f"pages leaked: {pages}"


@contextmanager
def running_mesh(state_dir: Path, *arguments: str, up_timeout_s: float = 120.0) -> Iterator[RunningMesh]:
    """A mesh started with `chipmesh up --detach ARGUMENTS`, stopped at the end."""
    started = run_cli("up", "--detach", "--json", *arguments, state_dir=state_dir, timeout_s=up_timeout_s)
    try:
        assert started.returncode == 0, f"chipmesh up failed: {started.stderr}{started.stdout}"
        description = json.loads(started.stdout)
        client = MeshClient(description["gateway"]["address"])
        try:
            yield RunningMesh(state_dir, description, client)
        finally:
            client.close()
    finally:
        stopped = run_cli("down", state_dir=state_dir)
        assert stopped.returncode == 0, f"chipmesh down failed: {stopped.stderr}{stopped.stdout}"
