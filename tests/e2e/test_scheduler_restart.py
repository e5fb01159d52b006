"""The scheduler is killed under running streams and started again: all streams end with the right tokens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plugins.hash.oracle import continue_tokens
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import MeshClient, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

STREAMS = 16
TOKENS = 300


class Services:
    """Services started one by one, each from its own configuration file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, **config: Any) -> dict[str, Any]:
        """Start a service; what it wrote into its ready file."""
        ready, file = self.folder / f"{kind}-ready.json", self.folder / f"{kind}.json"
        ready.unlink(missing_ok=True)
        file.write_text(json.dumps({"ready_file": str(ready), **config}), encoding="utf-8")
        with (self.folder / f"{kind}.log").open("ab") as log:
            self.running[kind] = subprocess.Popen(
                [sys.executable, "-m", "meshkit.cli", kind, "--config", str(file)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert self.running[kind].poll() is None, (self.folder / f"{kind}.log").read_text()
            assert time.monotonic() < deadline, f"{kind} was not ready in time"
        content: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
        return content

    def kill(self, kind: str) -> None:
        """SIGKILL, and wait for the process to be gone."""
        process = self.running.pop(kind)
        process.kill()
        assert process.wait(timeout=10) == -signal.SIGKILL

    def stop_all(self) -> None:
        """SIGTERM to all; each must end with 0."""
        codes = {}
        for kind in ("gateway", "worker", "scheduler"):
            if kind in self.running:
                self.running[kind].terminate()
                codes[kind] = self.running.pop(kind).wait(timeout=30)
        assert not any(codes.values()), f"exit codes {codes}"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.stop_all()


def test_streams_go_on_when_the_scheduler_was_killed_and_started_again(services: Services) -> None:
    model = str(write_hash_model(services.folder))
    scheduler = services.start("scheduler")["address"]
    gateway = services.start(
        "gateway",
        scheduler_address=scheduler,
        models=[{"name": "hash", "path": model, "load_format": "dummy"}],
    )
    services.start(
        "worker", scheduler_address=scheduler, worker_id="w0", model="hash", model_path=model,
        load_format="dummy", backend="hash", backend_options={"step_ms": "5"},
    )  # fmt: skip
    client = MeshClient(gateway["address"])
    killed_at: list[int] = []

    def stream(index: int) -> None:
        prompt = [index, 1, 2, 3]
        events = client.stream(token_request(prompt, max_tokens=TOKENS))
        assert next(events).WhichOneof("kind") == "accepted"
        seen: list[int] = []
        for event in events:
            assert event.output.first_index == len(seen) or event.WhichOneof("kind") == "finished"
            seen.extend(event.output.token_ids)
            if index == 0 and not killed_at and len(seen) > TOKENS // 10:
                killed_at.append(len(seen))
                services.kill("scheduler")
                services.start("scheduler", listen=scheduler)
        assert seen == continue_tokens(prompt, TOKENS, VOCAB_SIZE)

    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(stream, range(STREAMS)))
    finally:
        client.close()
    assert killed_at, "the scheduler was never killed, so this test has shown nothing"
    assert killed_at[0] < TOKENS
