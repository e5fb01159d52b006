"""A GGUF of each family is the model that it was written from: names, orders of rows, stacks, norms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.conftest import Family
from tests.parity.gguf_files import write_gguf
from tests.parity.oracle import check_logits
from tests.parity.paths import plan, whole_logits
from tests.parity.tiny_models import PROMPTS, VARIANTS

WRITTEN = [
    "llama",
    "llama-biases-tied",
    "llama-linear",
    "llama-yarn",
    "mistral-window",
    "mixtral",
    "qwen2",
    "qwen2-moe-sparse",
    "qwen3",
    "qwen3-moe",
    "gemma2-gguf",
    "gemma3-gguf",
]


@pytest.mark.parametrize("family", WRITTEN, indirect=True)
def test_a_gguf_gives_the_logits_of_the_model_it_was_made_of(family: Family, tmp_path: Path) -> None:
    file = write_gguf(family.folder, family.oracle.config, tmp_path / f"{family.name}.gguf")
    planned = plan("program", file, cache_dir=str(tmp_path / "cache"))
    assert planned.architecture == VARIANTS[family.name].architecture
    assert (planned.plan.step_program.value == "llama") is VARIANTS[family.name].by_program
    check_logits(whole_logits(planned, PROMPTS[0]), family.oracle.logits(PROMPTS[0]), where=family.name)
