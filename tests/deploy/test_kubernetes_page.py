"""docs/kubernetes.md says what the chart and the worker's own rule for its memory say."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.deploy.chart import DEPLOY, VALUES, read_values, render
from worker_svc.kv_sizing import DeviceMemory, KvRequest, size_kv_cache

PAGE = (DEPLOY.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
GIB = 1 << 30
BYTES_OF_BFLOAT16 = 2


def sizes() -> Iterator[tuple[str, list[str]]]:
    """Rows of the table of sizes: the model, and its cells."""
    table = PAGE.split("| model, bfloat16 |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        model, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        yield model, cells


@pytest.mark.parametrize(("model", "cells"), list(sizes()))
def test_as_many_tokens_fit_as_the_page_says(model: str, cells: list[str]) -> None:
    parameters, shape, kv_bytes, *tokens = cells
    layers, heads, head_size = (int(part) for part in shape.split("×"))
    assert int(kv_bytes) == 2 * layers * heads * head_size * BYTES_OF_BFLOAT16, model
    weights = int(float(parameters) * BYTES_OF_BFLOAT16)
    for memory_gib, count in zip((40, 80, 96), tokens, strict=True):
        if count == "–":
            assert weights > 0.85 * memory_gib * GIB
            continue
        memory = DeviceMemory(memory_gib * GIB, memory_gib * GIB - weights, shared_with_host=False)
        size = size_kv_cache(
            KvRequest(), memory, page_size=16, kv_bytes_per_token=int(kv_bytes), weight_bytes=weights
        )
        assert int(count) == size.page_count * size.page_size, f"{model} on {memory_gib} GiB"


def test_the_page_names_every_file_of_values() -> None:
    named = set(re.findall(r"^\| `([a-z-]+)\.yaml` \|", PAGE, re.MULTILINE))
    assert named == set(VALUES) - {"default"}


def test_the_secrets_that_the_page_makes_are_those_that_the_default_mounts() -> None:
    made = set(re.findall(r"for name in (.*); do", PAGE)[0].split())
    mounted = {
        source["secret"]["name"].removeprefix("chipmesh-tls-")
        for pod in render(read_values("default")).pods().values()
        for volume in pod["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
    }
    assert made == mounted
    for name in made:
        role, _, own = name.partition("-")
        assert re.search(rf"--{role} {own}\b", PAGE)
