"""Every family gives the logits and the greedy tokens of `transformers` in float32, whatever the batch, the
chunks, the pages and the cache.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.conftest import Family
from tests.parity.oracle import check_logits
from tests.parity.paths import drive, plan, whole_logits
from tests.parity.tiny_models import PROMPTS, VARIANTS
from tests.unit.models.step_driver import GREEDY

MADE = 64
SHORT = 16
"""Tokens of runs that repeat another one under other conditions."""
PATHS = [
    pytest.param(name, path, id=f"{name}-{path}")
    for name, variant in VARIANTS.items()
    for path in ("operators", "reference", "program")
    if path != "program" or variant.by_program
]
FAST_PATHS = [param for param in PATHS if param.values[1] != "reference"]
each_path = pytest.mark.parametrize(("family", "path"), PATHS, indirect=["family"])
each_fast_path = pytest.mark.parametrize(("family", "path"), FAST_PATHS, indirect=["family"])


@each_path
def test_logits_are_those_of_transformers(family: Family, path: str) -> None:
    tokens = [*PROMPTS[0], *PROMPTS[2]]
    planned = plan(path, family.folder)
    assert (planned.plan.step_program.value == "llama") is (path == "program")
    check_logits(whole_logits(planned, tokens), family.oracle.logits(tokens), where=family.name)


@each_path
def test_64_greedy_tokens_are_those_of_transformers(family: Family, path: str) -> None:
    driver = drive(path, family.folder)
    settings = replace(GREEDY, logprobs=True)
    sequence = driver.admit(0, PROMPTS[0], room=MADE, settings=settings)
    driver.run([sequence], MADE, chunk=512)
    assert len(set(sequence.made)) > 8, "a model that repeats itself shows little"
    family.oracle.check_greedy(PROMPTS[0], sequence.made, where="alone")
    family.oracle.check_logprobs(PROMPTS[0], sequence.made, sequence.logprobs, where="alone")


@each_fast_path
def test_neighbours_change_no_token(family: Family, path: str) -> None:
    driver = drive(path, family.folder)
    sequences = [driver.admit(slot, prompt, room=MADE) for slot, prompt in enumerate(PROMPTS)]
    driver.run(sequences, MADE, chunk=16)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        family.oracle.check_greedy(prompt, sequence.made, where=f"beside others, {len(prompt)} tokens")


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 16), (7, 4), (16, 1), (16, 16)])
@each_fast_path
def test_chunks_and_pages_change_no_token(family: Family, path: str, chunk: int, page_size: int) -> None:
    driver = drive(path, family.folder, page_size=page_size)
    sequence = driver.admit(0, PROMPTS[0], room=SHORT)
    driver.run([sequence], SHORT, chunk=chunk)
    family.oracle.check_greedy(PROMPTS[0], sequence.made, where=f"chunks of {chunk}, pages of {page_size}")


@each_fast_path
def test_a_cached_prefix_changes_no_token(family: Family, path: str) -> None:
    driver = drive(path, family.folder)
    first = driver.admit(0, PROMPTS[0], room=SHORT)
    driver.run([first], SHORT, chunk=512)
    shared = [*PROMPTS[0][:32], *PROMPTS[2]]
    for slot, (pages, prompt) in enumerate([(4, PROMPTS[0]), (4, shared), (1, PROMPTS[0])], start=1):
        hit = driver.admit(slot, prompt, room=SHORT, shared_pages=first.pages[:pages])
        driver.run([hit], SHORT, chunk=512)
        assert hit.done == len(prompt)
        family.oracle.check_greedy(prompt, hit.made, where=f"on {pages} cached pages")
