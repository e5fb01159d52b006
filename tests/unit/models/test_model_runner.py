"""The framework's runner on a tiny model: what it refuses, and that rows, chunks and pages change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from meshkit.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from meshkit.modelstore import tensor_shapes
from plugins.cpu.memory import CpuMemory
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.backend import Backend
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import LoadOptions, PrefillRow, StepBatch
from tests.unit.models.step_driver import GREEDY, StepDriver, sampled
from tests.unit.models.tiny_llama import CONFIG, write_model
from worker_svc.model_runner import OperatorModelRunner
from worker_svc.weights import DummyWeights

PROMPT = [5, 17, 80, 3, 41, 9, 60, 22, 7, 11, 90, 33, 4]


class ReferenceBackend(CpuBackend):
    """A chip that covers no operator."""

    def __init__(self) -> None:
        super().__init__(CpuOptions(threads=1))
        self._bare = OperatorSet(CpuMemory())

    @property
    def operators(self) -> OperatorSet | None:
        return self._bare

    def capabilities(self) -> CapabilityReport:
        return replace(super().capabilities(), operators=self._bare.capabilities())


def silent(stage: str, share: float) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real safetensors whose logits are spread well apart, so that greedy tokens are no near ties."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny")
    weights = DummyWeights({**CONFIG, "head_dim": 8, "tie_word_embeddings": False, "attention_bias": False,
                            "mlp_bias": False}, seed=3)  # fmt: skip
    save_file({name: weights.read(name) * 12 for name in weights.names()}, folder / "model.safetensors")
    return folder


def load(model: Path | str, backend: Backend | None = None, **options: Any) -> OperatorModelRunner:
    runner = OperatorModelRunner(backend or CpuBackend(CpuOptions(threads=1)))
    runner.load(LoadOptions(str(model), **options), silent)
    return runner


def driver_of(runner: OperatorModelRunner, page_size: int = 4, page_count: int = 200) -> StepDriver:
    runner.allocate_kv_cache(page_count=page_count, page_size=page_size, max_slots=8)
    return StepDriver(runner, page_count=page_count, page_size=page_size)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[int]:
    """Tokens of the prompt alone, on reference operators."""
    driver = driver_of(load(tiny, ReferenceBackend()))
    (tokens,) = driver.run([driver.admit(0, PROMPT, room=12)], 12, chunk=512)
    assert len(set(tokens)) > 3
    return tokens


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_pages_and_chunks_change_nothing(tiny: Path, expected: list[int], page_size: int, chunk: int) -> None:
    driver = driver_of(load(tiny), page_size)
    assert driver.run([driver.admit(0, PROMPT, room=12)], 12, chunk=chunk) == [expected]


def test_neighbours_that_come_and_go_change_nothing(tiny: Path, expected: list[int]) -> None:
    driver = driver_of(load(tiny))
    watched = driver.admit(3, PROMPT, room=12)
    others = [driver.admit(slot, PROMPT[slot:], room=12, settings=sampled(slot)) for slot in (0, 5, 7)]
    driver.step([], [(watched, 4), (others[0], 13)])
    driver.step(others[:1], [(watched, 9), (others[1], 3)])
    driver.release(others[:1])
    driver.run([watched, *others[1:]], 12, chunk=2)
    assert watched.made == expected


def test_cached_pages_serve_another_request(tiny: Path, expected: list[int]) -> None:
    driver = driver_of(load(tiny))
    first = driver.admit(0, PROMPT, room=12)
    driver.run([first], 12, chunk=512)
    again = driver.admit(1, PROMPT, room=12, shared_pages=first.pages[:3])
    assert again.done == 12
    assert driver.run([again], 12, chunk=512) == [expected]


def test_random_requests_are_repeated_by_their_seed_and_continued_by_replay(tiny: Path) -> None:
    driver = driver_of(load(tiny))
    settings = sampled(7, top_k=20, frequency_penalty=0.5)
    first = driver.admit(0, PROMPT, room=12, settings=settings)
    other = driver.admit(1, PROMPT, room=12, settings=replace(settings, seed=8))
    driver.run([first, other], 12, chunk=512)
    assert first.made != other.made
    replayed = driver.admit(2, PROMPT + first.made[:6], room=8, settings=settings, output_count=6)
    assert driver.run([replayed], 6, chunk=4) == [first.made[6:]]


def test_a_step_without_a_last_chunk_samples_nothing(tiny: Path) -> None:
    driver = driver_of(load(tiny))
    output = driver.step([], [(driver.admit(0, PROMPT, room=1), 5)])
    assert output.slots.tolist() == output.token_ids.tolist() == []


def test_bfloat16_and_a_narrower_cache_run(tiny: Path, expected: list[int]) -> None:
    narrower: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"kv_cache_dtype": "bfloat16"}]
    for options in narrower:
        driver = driver_of(load(tiny, **options))
        (tokens,) = driver.run([driver.admit(0, PROMPT, room=12)], 12, chunk=5)
        assert tokens[0] == expected[0]


def test_the_description_says_what_was_loaded(tiny: Path) -> None:
    runner = OperatorModelRunner(CpuBackend(CpuOptions(threads=1)))
    stages: list[tuple[str, float]] = []
    options = LoadOptions(str(tiny), kv_cache_dtype="bfloat16")
    model = runner.load(options, lambda stage, share: stages.append((stage, share)))
    assert (model.architecture, model.vocab_size, model.context_tokens) == ("LlamaForCausalLM", 97, 128)
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert (model.numeric_class, model.kv_cache_dtype, list(model.eos_token_ids)) == (
        "float32",
        "bfloat16",
        [2],
    )
    values = sum(int(np.prod(shape)) for shape in tensor_shapes(_completed()).values())
    assert model.weight_bytes == values * 4
    choices = {item.name: item.choice for item in model.operators}
    assert choices.pop("qkv_rotary") == "decomposed"
    assert set(choices.values()) == {"native", "fused"}
    shares = [share for stage, share in stages if stage == "weights"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert stages[-1] == ("first forward", 1.0)
    assert runner.allocate_kv_cache(page_count=10, page_size=4, max_slots=1) == 40 * model.kv_bytes_per_token


def _completed() -> dict[str, object]:
    return {**CONFIG, "head_dim": 8, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"dtype": "float8"}, "dtype", "supports auto, float32, bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "supports auto, float32, bfloat16"),
        ({"load_format": "pickle"}, "load_format", "auto, safetensors, gguf, dummy"),
        ({"load_format": "gguf"}, "load_format", "model.safetensors"),
    ],
)
def test_options_that_cannot_be_are_refused_at_load(
    tiny: Path, options: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        load(tiny, **options)
    assert caught.value.field == field


def test_an_unknown_architecture_and_device_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "other", architectures=["MambaForCausalLM"])
    with pytest.raises(InvalidArgument, match=r"Mamba.*LlamaForCausalLM") as caught:
        load(model, load_format="dummy")
    assert caught.value.field == "model_path"
    with pytest.raises(NotFound):
        load(write_model(tmp_path / "fine"), load_format="dummy", device=10_000)


def test_strict_refuses_a_chip_that_does_not_cover_the_operators(tiny: Path) -> None:
    with pytest.raises(FailedPrecondition, match="attention_decode"):
        load(tiny, ReferenceBackend(), strict=True)
    load(tiny, strict=True)


def test_damaged_weights_are_caught_by_the_first_forward_and_the_operator_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "damaged")
    weights = DummyWeights(_completed())
    tensors = {name: weights.read(name) for name in weights.names()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(FailedPrecondition, match=r"first in linear of model\.layers\.1\.mlp\.down") as caught:
        load(folder)
    assert caught.value.reason == "NON_FINITE_LOGITS"


def test_biased_and_tied_models_match_the_plain_product(tmp_path: Path) -> None:
    """Biases and tied heads take other paths through the loader: reference and native have to agree."""
    model = write_model(tmp_path / "biased", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    logprobs = []
    for backend in (ReferenceBackend(), CpuBackend(CpuOptions(threads=1))):
        driver = driver_of(load(model, backend, load_format="dummy"))
        sequence = driver.admit(0, PROMPT, room=2, settings=replace(GREEDY, logprobs=True))
        driver.run([sequence], 2, chunk=512)
        logprobs.append(sequence.logprobs)
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda runner: runner.allocate_kv_cache(page_count=2, page_size=4, max_slots=1),
        lambda runner: runner.run_step(_one_token()),
    ],
)
def test_calls_before_their_time_are_refused(call: Callable[[OperatorModelRunner], object]) -> None:
    with pytest.raises(FailedPrecondition):
        call(OperatorModelRunner(CpuBackend(CpuOptions(threads=1))))


def _one_token() -> StepBatch:
    ids = np.zeros(1, dtype=np.int32)
    return StepBatch(decode=None, prefill=[PrefillRow(0, 0, ids, ids, True)])


class FullOnce(CpuBackend):
    """A chip that has no memory left for one step, when told."""

    def __init__(self, error: Exception) -> None:
        super().__init__(CpuOptions(threads=1))
        self.error = error
        self.is_full = False

    def execute_runnable(self, runnable: Callable[[], Any]) -> Any:
        if self.is_full:
            self.is_full = False
            raise self.error
        return super().execute_runnable(runnable)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("nothing is left"), MemoryError("nothing is left")])
def test_a_device_without_memory_for_a_step_says_so_and_takes_the_next_ones(
    tiny: Path, expected: list[int], error: Exception
) -> None:
    chip = FullOnce(error)
    runner = load(tiny, chip)
    driver = driver_of(runner)
    chip.is_full = True
    with pytest.raises(ResourceExhausted, match=r"nothing is left.*mem_fraction_static"):
        driver.run([driver.admit(0, PROMPT, room=12)], 12, chunk=512)
    runner.reset()  # As the engine does when a scheduler attaches anew.
    assert driver.run([driver.admit(0, PROMPT, room=12)], 12, chunk=512) == [expected]


def test_unloading_frees_the_pages_and_is_idempotent(tiny: Path) -> None:
    backend = CpuBackend(CpuOptions(threads=1))
    runner = load(tiny, backend)
    before = backend.memory.stats(0).allocated_bytes
    runner.allocate_kv_cache(page_count=100, page_size=16, max_slots=2)
    assert backend.memory.stats(0).allocated_bytes > before
    with pytest.raises(FailedPrecondition, match="loaded"):
        runner.load(LoadOptions(str(tiny)), silent)
    runner.unload()
    runner.unload()
    assert backend.memory.stats(0).allocated_bytes == before
    runner.load(LoadOptions(str(tiny)), silent)


def test_a_chip_without_operators_cannot_be_driven() -> None:
    class Bare(ReferenceBackend):
        @property
        def operators(self) -> OperatorSet | None:
            return None

    with pytest.raises(FailedPrecondition, match="neither operators"):
        OperatorModelRunner(Bare())


@pytest.fixture(autouse=True, scope="module")
def _restore_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
