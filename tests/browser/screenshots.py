"""Makes the pictures of the page in docs/images: the small real model on two kinds of chips, under some load.

Run by `bash scripts/test_page.sh --screenshots`.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser.browsing import chromium, visit
from tests.support.mesh import running_mesh

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
MOST_BYTES = 300 * 1024
SHOTS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
TOPICS = ("rivers", "mountains", "lakes", "deserts", "islands", "forests")
STREAMS = 4
WARM_UP_MS = 20_000
"""Load before the first picture, so that the lines have a past."""


def main() -> None:
    """Write all pictures; AssertionError where one is too large."""
    FOLDER.mkdir(exist_ok=True)
    groups = ("--device-groups", "cpu:0,cpu:1;kunlun:0", "--backend-option", "kunlun.emulate=true")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mesh(Path(folder), "--model-path", "smollm2-135m", "--dtype", "float32", *groups) as mesh,
        chromium() as browser,
        load(mesh.description["page"]),
    ):
        url = mesh.description["page"]
        set_traffic(url, {"group-0": 80, "group-1": 20})
        for width, scheme in SHOTS:
            with visit(browser, url, width=width, color_scheme=scheme) as page:
                prepare(page, warm_up_ms=WARM_UP_MS if (width, scheme) == SHOTS[0] else 6000)
                save(page, FOLDER / f"page-{width}-{scheme}.png")


def prepare(page: Any, *, warm_up_ms: int) -> None:
    """A question, its answer and its trace."""
    page.wait_for_selector(".worker[data-state=ready] >> nth=2")
    page.wait_for_timeout(warm_up_ms)
    page.fill("#max-tokens", "64")
    page.fill("#temperature", "0")
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])", timeout=60_000)
    page.wait_for_selector("#answer-trace:not([hidden])")
    page.click("#answer-trace")
    page.wait_for_selector(".span >> nth=5")
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
    page.wait_for_timeout(2500)


def save(page: Any, path: Path) -> None:
    """The whole page, from its head to its foot."""
    page.screenshot(path=path, full_page=True, animations="disabled")
    size = path.stat().st_size
    print(f"{path.name}: {size / 1024:.0f} KiB")  # noqa: T201  # a script
    assert size < MOST_BYTES, f"{path} has {size} bytes, the limit is {MOST_BYTES}"


@contextmanager
def load(url: str) -> Iterator[None]:
    """Some streams at once, until the end."""
    over = threading.Event()
    numbers = itertools.count()

    def ask() -> None:
        while not over.is_set():
            number = next(numbers)
            text = f"Tell me about {TOPICS[number % len(TOPICS)]}, in {2 + number % 5} sentences."
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 32 + 16 * (number % 6)}
            post(f"{url}v1/chat/completions", body)

    threads = [threading.Thread(target=ask) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def set_traffic(url: str, weights: dict[str, float]) -> None:
    """As the sliders do."""
    post(f"{url}page/api/traffic", {"weights": weights})


def post(url: str, body: object) -> None:
    """JSON there, and whatever comes back."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


if __name__ == "__main__":
    main()
