"""A quantised checkpoint runs as its weights written out as floats do: AWQ, GPTQ and compressed-tensors, made
by a packer of the tests' own, through the runner that serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshkit.errors import InvalidArgument, MeshError
from meshkit.modelstore.sharding import ParallelLayout
from plugins.sdk.runner import LoadedModel, LoadOptions
from tests.parity.conftest import Family
from tests.parity.oracle import check_logits
from tests.parity.paths import backend_of, plan, silent, whole_logits
from tests.parity.quantized_files import FORMATS, write_quantized
from tests.parity.tiny_models import PROMPTS
from tests.unit.models.step_driver import StepDriver
from tests.unit.parallel.rank_threads import run_ranks
from worker_svc.model_runner import OperatorModelRunner

MADE = 64
W8A8_TOLERANCE = 0.05
"""Of logits against the weights as floats, relative to the largest: activations are rounded as well."""
TOKENS = [*PROMPTS[0], *PROMPTS[2]]
FOUR_BITS = [name for name, form in FORMATS.items() if form.bits == 4]
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe")
CASES = [
    *(("llama-biases-tied", name) for name in FOUR_BITS),
    ("qwen2", "gptq-order"),
    ("qwen3", "packed-zeros"),
    ("gemma3", "packed"),
    ("mixtral", "awq"),
    ("qwen2-moe", "gptq-v2"),
    ("qwen3-moe", "packed-rows"),
]
BY_NIGHT = ("awq-rows", "gptq", "packed", "packed-rows")
"""Of one family's formats those whose tokens are made at night only; logits are compared in every run."""
GREEDY_CASES = [
    pytest.param(
        *case, marks=pytest.mark.nightly if case[0].startswith("llama") and case[1] in BY_NIGHT else ()
    )
    for case in CASES
]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family, str], tuple[Path, Path]]:
    """(checkpoint, its twin in floats) of a family in a format; made when first asked for."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}
    root = tmp_path_factory.mktemp("quantized")

    def find(family: Family, name: str) -> tuple[Path, Path]:
        key = (family.name, name)
        if key not in made:
            made[key] = write_quantized(family.folder, root / "-".join(key), FORMATS[name])
        return made[key]

    return find


Written = Callable[[Family, str], tuple[Path, Path]]


def run(folder: Path, **options: Any) -> tuple[LoadedModel, list[list[int]]]:
    """What the runner says of a model, and 64 greedy tokens of three prompts in one batch, in chunks."""
    runner = OperatorModelRunner(backend_of("operators"))
    loaded = runner.load(LoadOptions(str(folder), dtype="float32", **options), silent)
    runner.allocate_kv_cache(page_count=100, page_size=8, max_slots=4)
    driver = StepDriver(runner, page_count=100, page_size=8)
    sequences = [driver.admit(slot, prompt, room=MADE) for slot, prompt in enumerate(PROMPTS)]
    driver.run(sequences, MADE, chunk=16)
    return loaded, [sequence.made for sequence in sequences]


@functools.cache
def tokens_of(folder: Path) -> list[list[int]]:
    """Of a model in floats, which several formats are compared with."""
    return run(folder)[1]


@pytest.mark.parametrize(("family", "name"), CASES, indirect=["family"])
def test_logits_of_four_bits_are_those_of_the_same_weights_as_floats(
    family: Family, name: str, written: Written
) -> None:
    quantized, floats = written(family, name)
    planned = plan("operators", quantized)
    names = {site.operator for site in planned.sites}
    assert ("moe_experts_w4a16" if family.name in MIXTURES else "linear_w4a16") in names
    wanted = whole_logits(plan("operators", floats), TOKENS)
    check_logits(whole_logits(planned, TOKENS), wanted, where=f"{family.name} as {name}")


@pytest.mark.parametrize(("family", "name"), GREEDY_CASES, indirect=["family"])
def test_64_greedy_tokens_are_those_of_the_same_weights_as_floats(
    family: Family, name: str, written: Written
) -> None:
    quantized, floats = written(family, name)
    loaded, made = run(quantized)
    assert made == tokens_of(floats)
    method, kind = FORMATS[name].config["quant_method"], "w4a16"
    assert loaded.numeric_class == f"float32+{method}-{kind}"
    assert loaded.weights_version.endswith(f"+{method}-{kind}")


def test_the_reference_operators_read_the_same_codes(
    family_of: Callable[[str], Family], written: Written
) -> None:
    quantized, floats = written(family_of("qwen2-moe"), "gptq-v2")
    wanted = whole_logits(plan("operators", floats), TOKENS)
    check_logits(whole_logits(plan("reference", quantized), TOKENS), wanted, where="reference")


@pytest.mark.parametrize("name", ["llama-biases-tied", "mixtral"])
def test_eight_bits_are_read_as_rounding_the_floats_at_load_makes_them(
    family_of: Callable[[str], Family], written: Written, name: str
) -> None:
    """Codes of the largest weight are 127 in both, so that scales and codes are the same."""
    quantized, floats = written(family_of(name), "integers")
    planned = plan("operators", quantized)
    assert any("w8a8" in site.operator for site in planned.sites)
    wanted = whole_logits(plan("operators", floats, quantization="w8a8"), TOKENS)
    check_logits(whole_logits(planned, TOKENS), wanted, where=name)
    loaded, made = run(quantized)
    assert made == run(floats, quantization="w8a8")[1]
    assert loaded.numeric_class == "float32+compressed-tensors-w8a8"


@pytest.mark.parametrize("name", ["llama-biases-tied", "gemma3"])
def test_eight_bits_lie_within_five_percent_of_the_floats(
    family_of: Callable[[str], Family], written: Written, name: str
) -> None:
    """Not of mixtures: a rounded activation may choose another expert."""
    quantized, floats = written(family_of(name), "integers")
    wanted = whole_logits(plan("operators", floats), TOKENS)
    error = float((whole_logits(plan("operators", quantized), TOKENS) - wanted).abs().max())
    assert error <= W8A8_TOLERANCE * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("layout", "family", "name"),
    [
        (ParallelLayout(tensor=2), "llama-biases-tied", "packed-rows"),
        (ParallelLayout(tensor=2), "mixtral", "awq"),
        (ParallelLayout(pipeline=2), "llama-biases-tied", "gptq-order"),
    ],
    indirect=["family"],
)
def test_two_ranks_make_the_tokens_of_one(
    layout: ParallelLayout, family: Family, name: str, written: Written
) -> None:
    quantized, _ = written(family, name)
    first, second = run_ranks(layout, lambda parallel: run(quantized, parallel=parallel)[1])
    assert first == second == run(quantized)[1]


def test_a_layout_that_cuts_groups_is_refused_with_the_numbers(
    family_of: Callable[[str], Family], written: Written
) -> None:
    quantized, _ = written(family_of("llama-biases-tied"), "packed")
    with pytest.raises(InvalidArgument, match=r"columns (0 to 48|48 to 96) of 96.*group of 32"):
        run_ranks(ParallelLayout(tensor=2), lambda parallel: run(quantized, parallel=parallel))


@pytest.mark.parametrize("name", ["gptq-order", "packed-order"])
def test_experts_in_the_order_of_activations_are_refused_with_the_cause(
    family_of: Callable[[str], Family], written: Written, name: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"experts\.0.*desc_act"):
        run(written(family_of("qwen3-moe"), name)[0])


def test_a_step_program_leaves_a_quantised_checkpoint_to_operators_and_says_so(
    family_of: Callable[[str], Family], written: Written
) -> None:
    planned = plan("program", written(family_of("llama-biases-tied"), "awq")[0])
    assert planned.plan.step_program.value is None
    assert "no w4a16 products" in planned.plan.step_program.reason
    assert planned.plan.quantization.reason.startswith("as the checkpoint is stored (awq-w4a16)")


@pytest.mark.parametrize("asked", ["w8a8", "gptq", "a8", "fp4"])
def test_another_quantization_than_the_checkpoint_has_is_refused(
    family_of: Callable[[str], Family], written: Written, asked: str
) -> None:
    quantized, _ = written(family_of("llama-biases-tied"), "awq")
    with pytest.raises(
        MeshError, match=f"quantization is '{asked}'.*quantised already, as awq-w4a16"
    ) as caught:
        plan("operators", quantized, quantization=asked)
    assert caught.value.field == "quantization"


@pytest.mark.parametrize("asked", ["w4a16", "awq"])
def test_naming_the_quantization_that_it_has_changes_nothing(
    family_of: Callable[[str], Family], written: Written, asked: str
) -> None:
    quantized, _ = written(family_of("llama-biases-tied"), "awq")
    assert run(quantized, quantization=asked) == run(quantized)


@pytest.mark.parametrize("name", ["gptq-order", "integers"])
def test_dummy_weights_of_a_quantised_checkpoint_take_the_same_operators(
    family_of: Callable[[str], Family], written: Written, name: str
) -> None:
    quantized, _ = written(family_of("llama-biases-tied"), name)
    real, dummy = (run(quantized, load_format=form)[0] for form in ("auto", "dummy"))
    assert [each.name for each in dummy.operators] == [each.name for each in real.operators]
    assert dummy.weight_bytes == real.weight_bytes


@torch.no_grad()
def test_transformers_agrees_with_the_floats_that_the_codes_mean(
    family_of: Callable[[str], Family], written: Written
) -> None:
    """The twin is no invention of ours: `transformers` on it gives our logits of the checkpoint."""
    from transformers import AutoModelForCausalLM

    quantized, floats = written(family_of("llama-biases-tied"), "gptq-order")
    model: Any = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    model.eval()
    wanted = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    check_logits(whole_logits(plan("operators", quantized), TOKENS), wanted, where="transformers")
