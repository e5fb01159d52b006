"""The images' health check says what the service says."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "docker" / "healthcheck.py"


@contextmanager
def service(status: int, body: str) -> Iterator[str]:
    """Answers every GET so; yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Nothing: pytest's output is for the tests."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/health"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check(url: str) -> subprocess.CompletedProcess[str]:
    environment = {"CHIPMESH_HEALTH_URL": url, "http_proxy": "http://127.0.0.1:1"}
    return subprocess.run(
        [sys.executable, "-I", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_exit_code_is_the_services_health_and_its_parts_are_shown(status: int, code: int) -> None:
    with service(status, '{"parts": {"executor": "starting"}}') as url:
        done = check(url)
    assert done.returncode == code
    assert '"executor": "starting"' in done.stdout + done.stderr


def test_a_service_that_does_not_answer_is_unhealthy() -> None:
    with service(200, "") as url:
        pass
    done = check(url)
    assert done.returncode == 1
    assert url in done.stderr
