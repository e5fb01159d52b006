"""A small HTTP server that stands in for the Hugging Face hub: what pulling a model asks for, no more."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REVISION = "0123456789abcdef0123456789abcdef01234567"


class HubStandIn:
    """Serves one repository. paths: what was asked for, in order; sent: names of files that were sent.
    broken: files that are listed and missing.
    """

    def __init__(self, repo: str, files: Mapping[str, bytes]) -> None:
        self.repo = repo
        self.files = dict(files)
        self.paths: list[str] = []
        self.sent: list[str] = []
        self.broken: set[str] = set()
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        if path.startswith(f"/api/models/{self.repo}"):
            body = json.dumps(self._listing()).encode()
            return 200, {"Content-Type": "application/json"}, body
        prefix = f"/{self.repo}/resolve/{REVISION}/"
        name = path.removeprefix(prefix)
        if name in self.broken:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if path.startswith(prefix) and name in self.files:
            body = self.files[name]
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": REVISION}
            return 200, headers, body
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _listing(self) -> dict[str, Any]:
        return {
            "id": self.repo,
            "sha": REVISION,
            "siblings": [{"rfilename": name, "size": len(body)} for name, body in self.files.items()],
        }


@contextmanager
def serve(hub: HubStandIn) -> Iterator[HubStandIn]:
    """At `hub.url` until the block is left."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.paths.append(path)
            status, headers, body = hub.answer(path)
            if with_body and status == 200:
                hub.sent.append(path.rpartition("/")[2])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
