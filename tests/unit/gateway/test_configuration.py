"""Configuration and models: what is accepted, what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig, ServedModelConfig
from gateway.models import ServedModel, ServedModels, open_models, open_served_model
from meshkit.address import is_local
from meshkit.config import describe, parse_config
from meshkit.errors import FailedPrecondition, InvalidArgument
from tests.unit.gateway.tiny_model import CONTEXT_TOKENS, IM_END, VOCAB_SIZE, write_tiny_model

MODEL = {"name": "m", "path": "/models/m"}


def config_of(**fields: Any) -> GatewayConfig:
    raw = {"scheduler_address": "127.0.0.1:1", "models": [MODEL], **fields}
    return parse_config(GatewayConfig, raw, source="test")


@pytest.mark.parametrize(
    ("listen", "local"),
    [
        ("127.0.0.1:0", True), ("127.1.2.3:5", True), ("localhost:5", True), ("[::1]:5", True),
        ("unix:/run/gateway", True), ("0.0.0.0:5", False), ("[::]:5", False), ("10.0.0.1:5", False),
        ("nonsense", False),
    ],
)  # fmt: skip
def test_reflection_is_on_where_only_this_host_can_ask(listen: str, local: bool) -> None:
    assert is_local(listen) is local
    if listen != "nonsense":
        assert config_of(listen=listen).reflection is local
        assert config_of(listen=listen, reflection=not local).reflection is not local


def test_reflection_shows_as_it_counts() -> None:
    assert json.loads(describe(config_of()))["reflection"] is True


@pytest.mark.parametrize(
    ("fields", "field", "part"),
    [
        ({"models": []}, "models", "at least 1"),
        ({"models": [MODEL, MODEL]}, "models", "used twice: m"),
        ({"models": [{"name": "m"}]}, "models.0", "needs a context_length"),
        ({"models": [{**MODEL, "vocab_size": 5}]}, "models.0", "leave vocab_size out"),
        ({"max_live_requests": 0}, "max_live_requests", "not 0"),
        ({"tokenizer_thread": 1}, "tokenizer_thread", "tokenizer_threads"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, Any], field: str, part: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        config_of(**fields)
    assert caught.value.field == field
    assert part in caught.value.message


def test_a_models_facts_come_from_its_folder(tiny: ServedModel) -> None:
    assert (tiny.context_tokens, tiny.vocab_size, tiny.eos_token_ids) == (
        CONTEXT_TOKENS,
        VOCAB_SIZE,
        (IM_END,),
    )
    assert tiny.text is not None
    assert not tiny.text.add_special_tokens


def test_a_context_can_be_made_shorter_and_not_longer(tiny_folder: Path) -> None:
    shorter = ServedModelConfig(name="m", path=str(tiny_folder), context_length=64)
    assert open_served_model(shorter, cache_dir=tiny_folder.parent).context_tokens == 64
    longer = ServedModelConfig(name="m", path=str(tiny_folder), context_length=4096)
    with pytest.raises(InvalidArgument, match=f"4096, the model has {CONTEXT_TOKENS}"):
        open_served_model(longer, cache_dir=tiny_folder.parent)


def test_a_folder_without_tokenizer_is_a_model_of_token_ids(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tokens", tokenizer=False)
    model = open_served_model(ServedModelConfig(name="m", path=str(folder)), cache_dir=tmp_path)
    assert (model.context_tokens, model.vocab_size, model.eos_token_ids) == (
        CONTEXT_TOKENS,
        VOCAB_SIZE,
        (IM_END,),
    )
    with pytest.raises(FailedPrecondition, match=r"tokenizer\.json") as caught:
        model.require_text("prompt.text")
    assert caught.value.field == "prompt.text"


@pytest.mark.parametrize("config", ["{", "[]", '{"vocab_size": -1, "max_position_embeddings": 5}', "{}"])
def test_a_damaged_folder_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidArgument):
        open_served_model(ServedModelConfig(name="m", path=str(tmp_path)), cache_dir=tmp_path)


def test_a_model_without_a_folder_needs_only_its_numbers(tmp_path: Path) -> None:
    config = ServedModelConfig(name="m", context_length=100, vocab_size=10)
    model = open_served_model(config, cache_dir=tmp_path)
    assert model == ServedModel("m", 100, 10, (), None)


def test_the_only_model_needs_no_name(tiny: ServedModel, tmp_path: Path) -> None:
    assert ServedModels([tiny]).find("") is tiny
    configs = [ServedModelConfig(name=name, context_length=100) for name in ("a", "b")]
    models = open_models(configs, cache_dir=tmp_path)
    assert models.names == ["a", "b"]
    with pytest.raises(InvalidArgument, match="a, b"):
        models.find("")
