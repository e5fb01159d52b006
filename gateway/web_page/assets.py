"""The page's files, held in memory, each with a tag by which a browser sees that it has it already."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.web_page.headers import SECURITY_HEADERS

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """One file. tag: its ETag."""

    content: bytes
    kind: str
    tag: str

    async def serve(self, request: Request) -> Response:
        """The file, or that the browser's copy is still good."""
        # A browser asks each time: after an upgrade no module meets one of another release.
        headers = {**SECURITY_HEADERS, "etag": self.tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def asset_routes() -> list[BaseRoute]:
    """`/` and `/page/FILE`. They hold nothing of the mesh, so they need no key. Reads files: call it in a
    thread.
    """
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in _KINDS)
    assets = {path.name: _read(path) for path in files}
    routes: list[BaseRoute] = [Route("/", assets[INDEX].serve, methods=["GET"])]
    return routes + [Route(f"/page/{name}", asset.serve, methods=["GET"]) for name, asset in assets.items()]


def _read(path: Path) -> Asset:
    content = path.read_bytes()
    return Asset(content, _KINDS[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
