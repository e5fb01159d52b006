"""`chipmesh diff`: sides that agree agree, and a planted fault is named by its layer, operator and kind."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from meshkit.cli import main as run_cli
from meshkit.errors import FailedPrecondition
from plugins.sdk import registry
from plugins.sdk.operator_table import BoundOperator
from plugins.sdk.operators import OperatorSet
from plugins.sdk.registry import register_backend
from tests.unit.models.tiny_llama import CONFIG, write_model
from tests.unit.worker_svc import planted
from worker_svc.diff.calls import RecordingOperators, check_all_repeated
from worker_svc.diff.comparison import layer_of
from worker_svc.diff.steps import plan_steps
from worker_svc.weights import DummyWeights

COMPLETED = {**CONFIG, "head_dim": 8, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": False}


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with biases; a tokenizer that knows one word for each id."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", attention_bias=True)
    weights = DummyWeights(COMPLETED, seed=5)
    save_file({name: weights.read(name) * 6 for name in weights.names()}, folder / "model.safetensors")
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Outcome:
    """What one run of the command gave."""

    def __init__(self, code: int, report: dict[str, Any]) -> None:
        self.code = code
        self.report = report

    @property
    def first(self) -> dict[str, Any]:
        """The first divergence; there has to be one."""
        first: dict[str, Any] = self.report["first_divergence"]
        assert self.code == 1
        return first

    def assert_agrees(self) -> None:
        assert (self.code, self.report["verdict"], self.report["first_divergence"]) == (0, "agrees", None)
        assert self.report["tokens"]["left"] == self.report["tokens"]["right"]
        assert all(line["diverging"] == 0 for line in self.report["operators"])


@pytest.fixture
def diff(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; "planted" is a back end of the given operators."""

    def run(left: str, right: str, *words: str, operators: type[OperatorSet] | None = None) -> Outcome:
        if operators is not None:
            register_backend("planted", planted.factory_of(operators))
        command = ["diff", "--model", str(tiny), "--left", left, "--right", right, "--json", *words]
        capsys.readouterr()
        code = run_cli(command)
        return Outcome(code, json.loads(capsys.readouterr().out))

    return run


@pytest.mark.parametrize("words", [[], ["--load-format", "dummy"], ["--quantization", "w8a8"],
                                   ["--quantization", "w4a16"]])  # fmt: skip
def test_a_chip_and_the_reference_agree_in_float32(diff: Any, words: list[str]) -> None:
    outcome = diff("cpu", "reference", "--dtype", "float32", *words)
    outcome.assert_agrees()
    assert outcome.report["input"]["recorded_side"] == "left"
    for stage in outcome.report["end_to_end"]:
        assert stage["rms_relative_by_row"] < 1e-4


@pytest.mark.parametrize("sides", [("cpu", "reference"), ("reference", "cpu"), ("cpu", "cpu")])
def test_a_chip_in_bfloat16_agrees_with_the_reference_on_the_same_rounded_weights(
    diff: Any, sides: tuple[str, str]
) -> None:
    """Inputs always come from the side in the shorter dtype, whose values the other one has exactly."""
    outcome = diff(*sides, "--dtype", "bfloat16")
    assert (outcome.code, outcome.report["first_divergence"]) == (0, None)
    recorded = outcome.report["input"]["recorded_side"]
    assert outcome.report[recorded]["dtype"] == "bfloat16"
    by_name = {line["operator"]: line["worst"] for line in outcome.report["operators"]}
    assert by_name["embedding"]["largest"] == by_name["write_kv"]["largest"] == 0.0


@pytest.mark.parametrize(
    ("operators", "operator", "layer", "step", "words"),
    [
        (planted.ForgetsEps, "rms_norm", "layers.0", "prefill 0-23", "goes with the value"),
        (planted.OffByOne, "qkv_rotary", "layers.0", "prefill 0-23", ""),
        (planted.ForgetsCache, "attention_prefill", "layers.0", "prefill 24-39", ""),
        (planted.WritesNextCell, "write_kv", "layers.0", "prefill 0-23", ""),
        (planted.AddsConstant, "silu_mul", "layers.0", "prefill 0-23", "bias"),
        (planted.WrongInSecondLayer, "silu_mul", "layers.1", "prefill 0-23", "goes with the value"),
    ],
)
def test_a_planted_fault_is_named_by_layer_operator_and_step_and_is_systematic(
    diff: Any, operators: type[OperatorSet], operator: str, layer: str, step: str, words: str
) -> None:
    first = diff("planted", "reference", operators=operators).first
    assert (first["operator"], first["layer"], first["step"]) == (operator, layer, step)
    assert first["nature"]["kind"] == "systematic"
    assert words in first["nature"]["reason"]
    assert first["out_of_tolerance"] > 0


@pytest.mark.parametrize("sides", [("planted", "reference"), ("reference", "planted")])
def test_a_fault_is_found_on_either_side_with_the_sign_of_right_less_left(
    diff: Any, sides: tuple[str, str]
) -> None:
    """Without eps the norm divides by less, so its result is larger."""
    first = diff(*sides, operators=planted.ForgetsEps).first
    assert first["operator"] == "rms_norm"
    assert (first["nature"]["slope"] < 0) == (sides[0] == "planted")


def test_weights_rounded_to_a_shorter_dtype_are_random(diff: Any) -> None:
    outcome = diff("planted", "reference", operators=planted.RoundsWeights)
    assert (outcome.first["operator"], outcome.first["layer"]) == ("qkv_rotary", "layers.0")
    by_name = {line["operator"]: line for line in outcome.report["operators"]}
    assert by_name["linear"]["diverging"] == by_name["linear"]["calls"]
    assert {by_name[name]["worst"]["nature"]["kind"] for name in ("qkv_rotary", "linear")} == {"random"}
    # The local difference of every other operator is its own: none, on equal inputs.
    others = [line["diverging"] for name, line in by_name.items() if name not in ("qkv_rotary", "linear")]
    assert others == [0] * len(others)


def test_values_that_are_not_finite_are_shown_where_they_begin(diff: Any) -> None:
    outcome = diff("reference", "planted", "--layers", operators=planted.BreaksInDecode)
    wanted = {"operator": "attention_decode", "layer": "layers.0", "step": "decode 40"}
    assert wanted.items() <= outcome.first.items()
    assert wanted.items() <= outcome.report["first_non_finite"]["right"].items()
    assert outcome.report["first_non_finite"]["left"] is None
    assert outcome.first["in_tolerances"] is None
    assert outcome.first["non_finite"] == {"left": 0, "right": 32}
    stages = {stage["stage"]: stage for stage in outcome.report["end_to_end"]}
    # 2 of 42 tokens are decoded.
    assert stages["layers.1"]["right"]["non_finite_share"] == pytest.approx(2 / 42)
    assert stages["layers.1"]["left"]["non_finite_share"] == 0.0


def test_the_json_has_each_stage_and_both_accumulation_modes(diff: Any) -> None:
    report = diff("cpu", "reference", "--layers").report
    assert [stage["stage"] for stage in report["end_to_end"]] == ["embedding", "layers.0", "layers.1", "head"]
    assert (report["left"]["backend"], report["right"]["backend"]) == ("cpu", "reference")
    assert {report[side]["accumulation_dtype"] for side in ("left", "right")} == {"float32"}
    assert report["input"]["steps"] == ["prefill 0-23", "prefill 24-39", "decode 40", "decode 41"]
    assert report["left"]["operators"]["qkv_rotary"] == ["decomposed"]
    assert report["right"]["operators"]["linear"] == ["reference"]
    statistics = report["end_to_end"][1]["left"]
    assert statistics["largest"] > statistics["deviation"] > abs(statistics["mean"])
    ratios = [call["in_tolerances"] for call in report["worst_calls"]]
    assert ratios == sorted(ratios, reverse=True)
    assert all(0 < ratio < 1 for ratio in ratios)
    assert "left" not in diff("cpu", "reference").report["end_to_end"][1]


def test_a_text_is_run_in_place_of_the_built_in_tokens(diff: Any) -> None:
    report = diff("cpu", "reference", "--prompt", "w5 w17 w80 w3").report
    assert report["input"]["prompt_token_ids"] == [5, 17, 80, 3]
    assert report["input"]["steps"] == ["prefill 0-2", "prefill 3-3", "decode 4", "decode 5"]


def test_a_person_reads_the_verdict(diff: Any, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register_backend("planted", planted.factory_of(planted.ForgetsEps))
    command = ["diff", "--model", str(tiny), "--left", "planted", "--right", "reference", "--layers"]
    assert run_cli(command) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "DIVERGES first in layers.0: rms_norm of model.layers.0.input_layernorm (prefill 0-23)" in text
    assert "systematic: it goes with the value" in text
    assert "values of each side by stage" in text
    assert run_cli([*command[:4], "cpu", *command[5:]]) == 0
    assert "agrees: all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--left", "nobody", "--right", "reference"], "--left"),
        (["--left", "reference", "--right", "hash"], "--right"),
        (["--left", "cpu", "--right", "reference", "--right-option", "a=b"], "--right-option"),
        (["--left", "cpu", "--left-option", "speed=9", "--right", "cpu"], "--left-option"),
        (["--left", "cpu", "--right", "cpu", "--right-option", "word"], "--right-option"),
        (["--left", "cpu", "--right", "reference", "--dtype", "float8"], "--dtype"),
        (["--left", "cpu", "--right", "reference", "--quantization", "w1"], "--quantization"),
        (["--left", "cpu", "--right", "reference", "--quantization", "a8"], "--quantization"),
        (["--left", "cpu", "--right", "reference", "--load-format", "pickle"], "--load-format"),
        (["--left", "cpu", "--right", "reference", "--prompt", ""], "--prompt"),
        (["--left", "cpu", "--right", "reference", "--model", "/nowhere"], "--model"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_names_the_flag(
    tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str], field: str
) -> None:
    model = [] if "--model" in words else ["--model", str(tiny)]
    assert run_cli(["diff", *model, *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


def test_sides_without_a_page_size_in_common_are_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register_backend("small", planted.factory_of(OperatorSet, 4, 8))
    register_backend("large", planted.factory_of(OperatorSet, 16))
    register_backend("some", planted.factory_of(OperatorSet, 16, 8))
    command = ["diff", "--model", str(tiny), "--json", "--left", "small", "--right"]
    assert run_cli([*command, "large"]) == 1
    assert "small takes [4, 8], large [16]" in capsys.readouterr().out
    assert run_cli([*command, "some"]) == 0
    assert json.loads(capsys.readouterr().out)["input"]["page_size"] == 8


def test_sides_that_make_other_calls_are_refused() -> None:
    class Table:
        def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
            return BoundOperator(name, where, lambda gate_up: gate_up, lambda _, weight: weight)

    calls: deque[Any] = deque()
    RecordingOperators(Table(), calls).bind("silu_mul", "layers.0.mlp", I=2).call(torch.ones(1, 4))
    with pytest.raises(FailedPrecondition, match=r"silu_mul of layers\.0\.mlp"):
        check_all_repeated(calls)


def test_what_is_recorded_is_not_changed_by_later_calls() -> None:
    class InPlace:
        def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
            return BoundOperator(name, where, lambda gate_up: gate_up.mul_(2), lambda _, weight: weight)

    calls: deque[Any] = deque()
    bound = RecordingOperators(InPlace(), calls).bind("silu_mul", "layers.0.mlp", I=2)
    bound.call(bound.call(torch.ones(1, 4)))
    assert [float(call.inputs["gate_up"][0, 0]) for call in calls] == [1.0, 2.0]
    assert [float(call.outputs[0][0, 0]) for call in calls] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("where", "layer"),
    [("model.layers.12.self_attn.o_proj", "layers.12"), ("model.embed_tokens", "embedding"),
     ("model.norm", "head"), ("lm_head", "head")],
)  # fmt: skip
def test_places_belong_to_stages(where: str, layer: str) -> None:
    assert layer_of(where) == layer


@pytest.mark.parametrize("count", [1, 2, 40, 41])
def test_steps_run_the_prompt_once_and_cover_every_position(count: int) -> None:
    steps = plan_steps(list(range(count)), 16)
    runs = [row for step in steps for row in step.batch.prefill]
    assert [token for row in runs for token in row.token_ids.tolist()] == list(range(count))
    assert [row.samples for row in runs] == [False] * (len(runs) - 1) + [True]
    decoded = [step.batch.decode for step in steps if step.batch.decode is not None]
    assert [int(rows.positions[0]) for rows in decoded] == [count, count + 1]
    assert all(len(row.page_ids) == math.ceil((count + 2) / 16) for row in runs)
