"""`benchmarks.token_path` and `detokenizing` run the services' own code to its end, with the right text."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.detokenizing import KINDS, Sample, expected, ours
from benchmarks.token_path import TOKENS, measure_gateway, measure_scheduler
from gateway.config import ServedModelConfig
from gateway.models import open_served_model
from gateway.text import Tokenizer
from tests.unit.gateway.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    text = open_served_model(ServedModelConfig(name="tiny", path=str(folder)), cache_dir=folder).text
    assert text is not None
    return text.tokenizer


@pytest.mark.parametrize("steps", [1, 4])
async def test_every_token_of_every_stream_goes_through_both_services(
    tokenizer: Tokenizer, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.token_path.TOKENS", TOKENS // 8)
    gateway = await measure_gateway(3, steps, tokenizer)
    scheduler = await measure_scheduler(3, steps)
    assert min(*gateway.values(), *scheduler.values()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_our_stream_says_what_all_tokens_say_at_once(tokenizer: Tokenizer, kind: str) -> None:
    sample = Sample(tokenizer, seed=5)
    for _ in range(20):
        prompt, ids = getattr(sample, kind)()
        assert ours(tokenizer, prompt, ids, 3) == expected(tokenizer, prompt, ids)
