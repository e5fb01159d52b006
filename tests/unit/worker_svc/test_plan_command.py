"""`chipmesh plan` says how each operator of a model would run, and why, without reading weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.app import main
from tests.unit.models.tiny_llama import write_model


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model without weights. Head size 32, which every chip takes."""
    return str(write_model(tmp_path / "model", hidden_size=64, num_attention_heads=2))


def test_every_operator_of_the_model_has_its_choice_and_reason(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan = run(capsys, "--model", model, "--backend", "cpu")
    assert code == 0
    lines = {line["operator"]: line for line in plan["operators"]}
    assert lines["qkv_rotary"]["choice"] == "decomposed"
    assert lines["attention_decode"]["choice"] == "native"
    assert lines["rms_norm"]["calls"] == 2
    assert lines["add_rms_norm"]["calls"] == 3
    assert all(line["reason"] for line in plan["operators"])
    assert plan["counts"]["decomposed"] == 2


def test_an_emulated_chip_is_planned_for_and_said_to_be_emulated(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan = run(capsys, "--model", model, "--backend", "kunlun", "--emulate", "--dtype", "float32")
    assert code == 0
    assert plan["emulated"] is True
    choices = {line["operator"]: line["choice"] for line in plan["operators"]}
    assert choices["attention_prefill"] == "native"
    assert choices["sample"] == "reference"


def test_a_table_is_printed_for_people(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--backend", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "attention" in text
    assert "page_size" in text


def test_a_plugin_with_a_runner_of_its_own_has_no_operator_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = run(capsys, "--model", "", "--backend", "hash")
    assert code == 0
    assert plan["operators"] == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--backend", "cpu", "--dtype", "float16"), 2, "dtype"),
        (("--backend", "nothing"), 2, "installed"),
        (("--backend", "kunlun", "--emulate", "--strict"), 1, "strict"),
        (("--backend", "kunlun", "--emulate", "--page-size", "5"), 2, "page_size"),
        (("--backend", "cpu", "--quantization", "fp4"), 2, "w4a16"),
        (("--backend", "cpu", "--quantization", "a8", "--option", "kernel=off"), 1, "kernel is off"),
        (("--backend", "cpu", "--kv-cache-dtype", "int4"), 2, "converts"),
        (("--backend", "cpu", "--emulate"), 2, "emulate"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_cause(
    model: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    got = main(["plan", "--model", model, *words])
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert got == code


def test_a_head_size_without_a_kernel_is_refused_before_any_weight_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "model", hidden_size=80, num_attention_heads=2))
    assert main(["plan", "--model", model, "--backend", "kunlun", "--emulate"]) == 1
    assert "D is 40" in capsys.readouterr().err
