"""smg, a router that others use, as a real process; `bash scripts/smg.sh` installs it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-smg"
PYTHON = ENVIRONMENT / "bin" / "python"
START_S = 60.0

needs_smg = pytest.mark.skipif(
    not PYTHON.exists(), reason="smg is not installed; `bash scripts/smg.sh` installs it"
)


class Stream:
    """One streamed answer of smg, read as it comes."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self.text = ""
        self.finish_reason: str | None = None
        self.is_done = False

    def read(self) -> bool:
        """Take in the next event; False at the end of the stream."""
        while line := self._answer.readline():
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                self.is_done = True
            elif line.startswith(b"data: "):
                self._take(json.loads(data))
                return True
        return False

    def read_to_end(self) -> None:
        """All that is left."""
        while self.read():
            pass
        assert self.is_done, "the stream broke off"
        self.close()

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def close(self) -> None:
        """Go away, whether or not it has ended."""
        self._answer.close()
        self._connection.close()


@dataclass
class Smg:
    """A router that runs. port: of its OpenAI interface; metrics_port: of its Prometheus page."""

    port: int
    metrics_port: int

    def get(self, path: str) -> Any:
        """A JSON document."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, **body: Any) -> Any:
        """The whole answer to a request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and message of a request that has to fail."""
        try:
            answer = self.post(path, **body)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        raise AssertionError(f"not refused: {answer}")

    def stream(self, path: str, **body: Any) -> Stream:
        """A streamed answer."""
        return Stream(self.port, path, {**body, "stream": True})

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; `name` may end in a label's beginning."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def wait_for_metric(self, name: str, least: float, *, timeout_s: float = 15.0) -> None:
        """Wait until a metric is at least so much."""
        deadline = time.monotonic() + timeout_s
        while (value := self.metric(name)) < least:
            assert time.monotonic() < deadline, f"{name} is {value} after {timeout_s} s, not {least}"
            time.sleep(0.05)


@contextmanager
def running_smg(gateway_address: str, folder: Path, *, model: str) -> Iterator[Smg]:
    """smg in front of a gateway, once it can serve `model`; its log lies in `folder`."""
    port, metrics_port = _free_port(), _free_port()
    command = [
        str(ENVIRONMENT / "bin" / "smg"), "launch", "--worker-urls", f"grpc://{gateway_address}",
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port),
        "--prometheus-host", "127.0.0.1", "--policy", "cache_aware", "--load-monitor-interval", "1",
    ]  # fmt: skip
    log = folder / "smg.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
    try:
        smg = Smg(port, metrics_port)
        _wait_until_ready(smg, process, log, model)
        yield smg
    finally:
        # It has nothing to save, and takes 5 s for an orderly end.
        process.kill()
        process.wait(timeout=10)


def _wait_until_ready(smg: Smg, process: subprocess.Popen[bytes], log: Path, model: str) -> None:
    """Until it has the worker, and a tokenizer for it."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            smg.post("/v1/completions", model=model, prompt="x", max_tokens=1)
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _free_port() -> int:
    """smg takes no port 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
