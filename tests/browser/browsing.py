"""A browser on the page: the system's Chromium, driven by Playwright; what goes wrong in it is an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INSTALL = "bash scripts/test_page.sh installs it"


def chromium_path() -> str | None:
    """Where the system has it."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser. Needs playwright and `chromium_path`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Its own sandbox needs what containers withhold; it shows nothing but our page.
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(browser: Any, url: str, *, width: int = 1280, height: int = 800, **options: Any) -> Iterator[Any]:
    """The page at `url`. What its scripts throw, or its policy refuses, fails the test at the end."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    faults: list[str] = []
    try:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: note_policy(faults, message))
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not faults, faults


def note_policy(faults: list[str], message: Any) -> None:
    """What the page's policy refuses is said on the console."""
    if "Content Security Policy" in message.text:
        faults.append(message.text)
