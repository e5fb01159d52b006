"""The page as its users have it: by keyboard, on a phone, in the dark, and when the scheduler is away."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser.browsing import visit
from tests.support.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(120)]

WAIT_S = 20.0
OPERATOR, PLAIN = "cmk_an-operators-own-key", "cmk_a-plain-clients-key"


def until(holds: Callable[[], Any], what: str) -> Any:
    """What `holds` returns as soon as it is true."""
    deadline = time.monotonic() + WAIT_S
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not in {WAIT_S} s: {what}"
    return value


def tab_to(page: Any, selector: str) -> None:
    """Press Tab until the focus is there; a keyboard's user has no other way."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.locator(f"{selector}:focus").count():
            return
    raise AssertionError(f"the Tab key never comes to {selector}")


def test_the_mesh_is_there_with_its_groups_workers_chips_and_figures(page: Any) -> None:
    groups = page.locator(".group")
    assert groups.count() == 2
    assert groups.first.locator("h3").inner_text() == "group-0"
    worker = page.locator(".worker").first
    assert worker.locator("h4").inner_text() == "worker-0"
    assert worker.locator(".chip").inner_text() == "hash"
    assert "0 of" in worker.locator(".gauge").first.inner_text()
    assert page.locator("#link-words").inner_text() == "Live"
    page.wait_for_selector(".tile:has-text('tokens/s')")
    assert page.locator(".tile").all_inner_texts()[2].startswith("Requests")


def test_a_chip_is_swapped_by_keyboard_alone_and_its_progress_is_seen(page: Any, mesh: RunningMesh) -> None:
    before = {replica["worker"]: replica["instance_id"] for replica in mesh.replicas()}
    tab_to(page, "[aria-label='Swap the chip of worker-1']")
    page.keyboard.press("Enter")
    assert page.locator("#swap-backend:focus").count(), "the focus is in the dialog"
    page.keyboard.type("hash")
    tab_to(page, "#swap-options")
    page.keyboard.type("step_ms=20")
    page.locator("#swap-options").press("Tab")
    tab_to(page, "#swap-form button[type=submit]")
    page.keyboard.press("Enter")
    page.wait_for_selector(".swap:has-text('Swapping to hash') progress")
    page.wait_for_selector(".swap:has-text('Swapped to hash in')", timeout=60_000)
    assert "worker-1 is swapped" in page.locator("#announcer").inner_text()
    after = {replica["worker"]: replica["instance_id"] for replica in mesh.replicas()}
    assert after["worker-0"] == before["worker-0"]
    assert after["worker-1"] != before["worker-1"]


def test_a_swap_that_is_refused_says_why_and_escape_closes_the_dialog(page: Any) -> None:
    button = page.locator("[aria-label='Swap the chip of worker-0']")
    button.click()
    page.fill("#swap-options", "no equals sign")
    page.click("#swap-form button[type=submit]")
    assert "KEY=VALUE" in page.locator("#swap-problem").inner_text()
    page.fill("#swap-backend", "tpu")
    page.fill("#swap-options", "")
    page.click("#swap-form button[type=submit]")
    page.wait_for_selector(".swap.problem:has-text('tpu')")
    if page.locator("#swap-dialog[open]").count():
        page.keyboard.press("Escape")
    assert page.locator("#swap-dialog[open]").count() == 0


def test_sliders_change_the_traffic_when_applied_and_not_before(page: Any, mesh: RunningMesh) -> None:
    def weights() -> dict[str, float]:
        return {group["name"]: group["weight"] for group in mesh.status()["groups"]}

    before = weights()
    tab_to(page, "#weight-group-0")
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    assert page.locator("#weight-group-0").input_value() == "80"
    assert weights() == before
    tab_to(page, "#traffic button[type=submit]")
    page.keyboard.press("Enter")
    until(lambda: weights() == {"group-0": 80, "group-1": 50}, "other weights")
    page.wait_for_selector(".group:has-text('group-0'):has-text('62 % of traffic')")
    page.locator("#weight-group-1").fill("0")
    page.locator("#weight-group-0").fill("0")
    page.wait_for_selector("#traffic:has-text('move one slider up')")
    assert page.locator("#traffic button[type=submit]").is_disabled()
    page.click("#traffic button:has-text('Undo')")
    assert page.locator("#traffic output").all_inner_texts() == ["62 %", "38 %"]


def test_the_playground_streams_and_tells_what_it_took_and_its_trace_is_a_waterfall(page: Any) -> None:
    page.fill("#max-tokens", "80")
    page.fill("#temperature", "0")
    page.fill("#seed", "7")
    page.locator("#prompt").fill("hello")
    page.locator("#prompt").press("Control+Enter")
    answer = page.locator("#answer")
    early = until(lambda: page.locator("#halt:not([disabled])").count() and answer.inner_text(), "some text")
    page.wait_for_selector("#send:not([disabled])")
    whole = answer.inner_text()
    assert len(whole) > len(early), "the text came in parts"
    facts = page.locator("#answer-facts").inner_text()
    for name in ("First token", "Speed", "Answer", "Prompt", "Ended by"):
        assert name in facts
    page.click("#answer-trace")
    page.wait_for_selector(".span")
    first = page.locator(".span summary").first
    until(lambda: page.locator(".span[open] dl").count() or first.press("Enter"), "a span is open")
    for service in ("gateway", "scheduler", "executor"):  # Each sends its spans when it comes to it.
        page.wait_for_selector(f".span-service:has-text('{service}')")
    assert page.locator(".span[open] summary:focus").count(), "what comes later closes nothing"
    assert page.locator("#trace-list [aria-current]").count() == 1


def test_an_answer_is_stopped_and_one_that_is_refused_says_why(page: Any) -> None:
    page.fill("#max-tokens", "2000")
    page.click("#send")
    page.wait_for_selector("#answer-facts:has-text('First token')")
    page.click("#halt")
    page.wait_for_selector("#answer-facts:has-text('stopped by you')")
    page.fill("#stop", "\n".join("abcdefghijklmnopq"))
    page.click("#send")
    page.wait_for_selector("#answer .problem:has-text('stop')")


def test_what_a_model_or_a_name_says_is_never_html(page: Any) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body='data: {"choices": [{"delta": {"content": "<img src=x onerror=alert(1)><b>bold</b>"}, '
            '"finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
        ),
    )
    page.click("#send")
    page.wait_for_selector("#answer:has-text('<b>bold</b>')")
    assert page.locator("#answer img, #answer b").count() == 0


def test_nothing_is_wider_than_a_phone_in_either_theme(browser: Any, url: str) -> None:
    for scheme in ("light", "dark"):
        with visit(browser, url, width=390, height=844, color_scheme=scheme, has_touch=True) as page:
            page.wait_for_selector(".worker >> nth=1")
            page.locator("details > summary").first.click()
            wide = page.evaluate(
                "() => [...document.querySelectorAll('body *')]"
                ".filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5)"
                ".filter((element) => !element.closest('.unseen, .skip'))"
                ".map((element) => element.outerHTML.slice(0, 120))"
            )
            assert wide == []
            assert page.evaluate("() => document.documentElement.scrollWidth") == 390
            page.click("[aria-label='Swap the chip of worker-0']")
            box = page.locator("#swap-dialog").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390


def test_light_and_dark_follow_the_system_until_they_are_chosen(browser: Any, url: str) -> None:
    def brightness(page: Any) -> int:
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    with visit(browser, url, color_scheme="dark") as page:
        assert brightness(page) < 200
        page.emulate_media(color_scheme="light")
        assert brightness(page) > 600
        page.emulate_media(color_scheme="dark")
        button = page.locator("#theme-button")
        button.click()
        assert button.inner_text() == "Theme: light"
        assert brightness(page) > 600
        page.reload()
        assert brightness(page) > 600, "the choice stays"
        button.click()
        page.emulate_media(color_scheme="light")
        assert brightness(page) < 200


CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = numbers(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.9) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest('.unseen, .skip, :disabled, option')) continue;
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${element.outerHTML.slice(0, 80)}`);
  }
  return poor;
}"""

UNNAMED = """() => [...document.querySelectorAll(
    'button, input, select, textarea, a[href], progress, dialog, [role=region]')]
  .filter((element) => {
    const by = element.getAttribute('aria-labelledby');
    const name = element.getAttribute('aria-label') || (by && document.getElementById(by)?.textContent)
      || (element.labels && [...element.labels].map((label) => label.textContent).join(''))
      || (['BUTTON', 'A'].includes(element.tagName) && element.textContent);
    return !name || !name.trim();
  }).map((element) => element.outerHTML.slice(0, 120))"""


def test_every_control_has_a_name_every_text_contrast_and_headings_are_in_order(
    browser: Any, url: str
) -> None:
    for scheme in ("light", "dark"):
        with visit(browser, url, color_scheme=scheme, reduced_motion="reduce") as page:
            page.wait_for_selector(".worker >> nth=1")
            assert page.evaluate(UNNAMED) == []
            assert page.evaluate(CONTRAST) == []
            levels = page.evaluate(
                "() => [...document.querySelectorAll('main :is(h1, h2, h3, h4), header h1')]"
                ".map((heading) => Number(heading.tagName[1]))"
            )
            assert levels[0] == 1
            assert all(after - before <= 1 for before, after in pairwise(levels))
            ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((element) => element.id)")
            assert len(ids) == len(set(ids))
            assert page.evaluate("() => document.documentElement.lang") == "en"


def test_the_focus_is_seen_and_the_first_tab_skips_to_the_mesh(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.locator(".skip:focus").count()
    for _ in range(12):
        page.keyboard.press("Tab")
        style = page.evaluate(
            "() => { const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);"
            " return [outlineStyle, outlineWidth]; }"
        )
        assert style == ["solid", "2px"]


def test_a_scheduler_that_is_away_is_said_with_the_age_of_what_is_shown_and_it_comes_back_by_itself(
    page: Any, mesh: RunningMesh
) -> None:
    pid = int(mesh.status()["scheduler"]["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        page.wait_for_selector("#link[data-state=away]", timeout=15_000)
        notice = page.locator("#notice").inner_text()
        assert "scheduler does not answer" in notice
        assert re.search(r"as it was \d+ s ago", notice)
        assert page.locator("#mesh.old").count()
        assert page.locator(".worker").count() == 2, "the last known state stays"
        assert page.locator("[aria-label='Drain worker-0']").is_disabled()
    finally:
        os.kill(pid, signal.SIGCONT)
    page.wait_for_selector("#link[data-state=live]")
    page.wait_for_selector("#notice", state="hidden")
    page.wait_for_selector(".worker[data-state=ready] >> nth=1")


def test_a_gateway_that_is_silent_is_said_too(page: Any, mesh: RunningMesh) -> None:
    pid = int(mesh.description["gateway"]["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        page.wait_for_selector("#notice:has-text('The gateway does not answer')")
    finally:
        os.kill(pid, signal.SIGCONT)
    page.wait_for_selector("#link[data-state=live]")


def test_a_drained_worker_says_so(page: Any) -> None:
    page.click("[aria-label='Drain worker-1']")
    page.fill("#drain-timeout", "1")
    page.click("#drain-form button[type=submit]")
    page.wait_for_selector(".worker:has-text('worker-1')[data-state=draining]")
    assert page.locator("#drain-dialog[open]").count() == 0


def test_an_operators_key_opens_the_mesh_and_is_forgotten_at_a_word(
    browser: Any, tmp_path: Path, mesh: RunningMesh
) -> None:
    model = mesh.state_dir / "tiny"
    keys = tmp_path / "keys.json"
    entries = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "operator": name == "boss"}
        for name, key in (("boss", OPERATOR), ("client", PLAIN))
    ]
    keys.write_text(json.dumps(entries))
    guarded = running_mesh(
        tmp_path / "state", "--model-path", str(model), "--load-format", "dummy", "--backend", "hash",
        "--api-keys-file", str(keys),
    )  # fmt: skip
    with guarded as closed, visit(browser, closed.description["page"]) as page:
        page.wait_for_selector("#link:has-text('Key needed')")
        assert page.locator(".worker, .tile:visible").count() == 0
        for key, words in (
            ("cmk_nobodys-key-at-all", "none of this gateway"),
            (PLAIN, "the playground works"),
        ):
            page.click("#notice-key")
            page.fill("#key", key)
            page.keyboard.press("Enter")
            page.wait_for_selector(f"#notice:has-text('{words}')")
        page.wait_for_selector("#model option[value=tiny]", state="attached")
        page.click("#notice-key")
        page.fill("#key", OPERATOR)
        page.keyboard.press("Enter")
        page.wait_for_selector(".worker[data-state=ready]")
        page.reload()
        page.wait_for_selector(".worker[data-state=ready]")
        assert OPERATOR not in page.content()
        page.click("#key-button")
        page.click("#key-forget")
        page.wait_for_selector("#link[data-state=refused]")
        assert page.locator(".worker").count() == 0
