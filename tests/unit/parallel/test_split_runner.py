"""The framework's runner as a rank of a set: what all ranks refuse alike, and what is computed where."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError, ResourceExhausted, Unavailable
from meshkit.modelstore.layouts import complete_config
from meshkit.modelstore.sharding import ParallelLayout
from plugins.cpu.memory import CpuMemory
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.collectives import Collectives
from plugins.sdk.communication import CommunicationOptions
from plugins.sdk.memory import Buffer
from plugins.sdk.planning import PlanRequest, plan_execution
from plugins.sdk.registry import load_backend
from plugins.sdk.runner import LoadedModel, LoadOptions, ParallelOptions
from plugins.sdk.slot_sampling import Sampled, SlotSampling
from plugins.sdk.timing import COMMUNICATION
from tests.unit.models.step_driver import StepDriver, sampled
from tests.unit.models.tiny_llama import CONFIG, write_model
from tests.unit.parallel.rank_threads import errors_of_ranks, run_ranks
from worker_svc.first_forward import run_probe
from worker_svc.model_building import allocate_pages, plan_model
from worker_svc.model_runner import OperatorModelRunner
from worker_svc.observed_operators import ObservedOperators, OperatorCall
from worker_svc.parallel.set_loading import join_ranks
from worker_svc.weights import DummyWeights

TWO = ParallelLayout(tensor=2)
FOUR = ParallelLayout(tensor=4)
STAGES = ParallelLayout(pipeline=2)
PROMPT = [5, 17, 80, 3, 41, 9, 60, 22, 7, 11, 90, 33, 4]
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
SOON_S = 30.0
"""Half the limit of a step in these tests: what is noticed by then is noticed before the limit."""


def silent(stage: str, share: float) -> None:
    """Progress that nobody watches."""


def load(
    folder: Path, parallel: ParallelOptions | None = None, *, backend: CpuBackend | None = None, **more: Any
) -> tuple[OperatorModelRunner, LoadedModel]:
    runner = OperatorModelRunner(backend or CpuBackend(CpuOptions(threads=1, kernel="off")))
    options = LoadOptions(str(folder), **{"dtype": "float32", "parallel": parallel, **more})
    return runner, runner.load(options, silent)


def make(runner: OperatorModelRunner, count: int = 12) -> list[int]:
    """Tokens of a request with a seed."""
    runner.allocate_kv_cache(page_count=10, page_size=8, max_slots=2)
    driver = StepDriver(runner, page_count=10, page_size=8)
    [made] = driver.run([driver.admit(0, PROMPT, room=count, settings=sampled(3))], count, chunk=5)
    runner.unload()
    return made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real safetensors whose logits are spread well apart."""
    return write_weights(tmp_path_factory.mktemp("models") / "tiny", seed=3)


def write_weights(folder: Path, *, seed: int, **changes: Any) -> Path:
    write_model(folder, **changes)
    weights = DummyWeights(complete_config({**CONFIG, **changes}, source="the test"), seed=seed)
    save_file({name: weights.read(name) * 12 for name in weights.names()}, folder / "model.safetensors")
    return folder


class Untouchable(CpuBackend):
    """A chip whose collectives must not even be looked at."""

    @property
    def collectives(self) -> Collectives | None:
        raise AssertionError("collectives were touched")


@pytest.mark.parametrize(
    "parallel", [None, ParallelOptions(0, 1, 1, "tcp://127.0.0.1:1", 1.0, 1.0)], ids=["none", "of-one"]
)
def test_a_model_that_is_not_split_touches_no_collectives(
    tiny: Path, parallel: ParallelOptions | None
) -> None:
    runner, described = load(tiny, parallel, backend=Untouchable(CpuOptions(threads=1, kernel="off")))
    assert described.numeric_class == "float32"
    assert runner.exchange("alone") == ("alone",)
    assert len(make(runner)) == 12


def test_more_ranks_than_key_heads_give_the_tokens_of_one(tiny: Path) -> None:
    """Four ranks hold two heads of keys, each of them twice."""
    alone, described = load(tiny)
    wanted = make(alone)

    def work(parallel: ParallelOptions) -> tuple[list[int], LoadedModel]:
        runner, model = load(tiny, parallel)
        return make(runner), model

    for made, model in run_ranks(FOUR, work):
        assert made == wanted
        assert model.kv_bytes_per_token * 2 == described.kv_bytes_per_token
        assert model.numeric_class == "float32+tp4"


def test_sums_in_pieces_change_no_token(tiny: Path) -> None:
    """Chunks of five rows in two pieces, the sum of the first under way while the second is computed."""
    alone, _ = load(tiny)
    wanted = make(alone)
    options = CpuOptions(threads=1, kernel="off", communication=CommunicationOptions(overlap_rows=2))

    def work(parallel: ParallelOptions) -> tuple[list[int], int]:
        runner, _ = load(tiny, parallel, backend=CpuBackend(options))
        stop = runner.start_timing(most_runs=1)
        made = make(runner)
        assert stop is not None
        return made, sum(each.calls for each in stop().totals if each.operator.name == "all_reduce")

    # Two whole chunks have two pieces of each of four sums; the last three tokens and 11 steps have one.
    for made, sums in run_ranks(TWO, work):
        assert made == wanted
        assert sums == 2 * (1 + 2 * 4) + 12 * (1 + 4)


@pytest.mark.parametrize(
    ("options", "numeric_class"),
    [
        ({"dtype": "bfloat16"}, "bfloat16+tp2"),
        ({"quantization": "w8a8"}, "float32+w8a8+tp2"),
        ({"quantization": "w4a16"}, "float32+w4a16+tp2"),
    ],
    ids=["bfloat16", "w8a8", "w4a16"],
)
def test_short_dtypes_and_quantised_mixtures_run_over_ranks(
    tmp_path: Path, options: dict[str, Any], numeric_class: str
) -> None:
    folder = write_model(tmp_path / "model", **MIXTURE)

    def work(parallel: ParallelOptions) -> tuple[list[int], LoadedModel]:
        runner, model = load(folder, parallel, load_format="dummy", **options)
        return make(runner), model

    (first, model), (second, _) = run_ranks(TWO, work)
    assert first == second
    assert model.numeric_class == numeric_class


@pytest.mark.parametrize("sizes", [{}, MIXTURE], ids=["dense", "mixture"])
def test_a_quantised_checkpoint_over_ranks_gives_the_tokens_of_one(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    """Its groups fall within a rank's columns, so the ranks have the very codes of the whole."""
    wide = {**MIXTURE, "intermediate_size": 128, "architectures": ["LlamaForCausalLM"], **sizes}
    stored = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    folder = write_model(tmp_path / "model", **wide, quantization_config=stored)
    runner, described = load(folder, load_format="dummy")
    wanted = make(runner)

    def work(parallel: ParallelOptions) -> tuple[list[int], LoadedModel]:
        split, model = load(folder, parallel, load_format="dummy")
        return make(split), model

    for made, model in run_ranks(TWO, work):
        assert made == wanted
        assert model.numeric_class == f"{described.numeric_class}+tp2"
        assert "linear_w4a16" in {decision.name for decision in model.operators}


def test_ranks_exchange_texts_through_the_runner(tiny: Path) -> None:
    def work(parallel: ParallelOptions) -> Sequence[str]:
        runner, _ = load(tiny, parallel)
        heard = runner.exchange(json.dumps({"rank": parallel.rank}))
        runner.unload()
        return heard

    assert run_ranks(TWO, work) == [('{"rank": 0}', '{"rank": 1}')] * 2


def test_the_plan_of_a_rank_is_of_its_sizes_and_says_why_no_step_program_runs(tiny: Path) -> None:
    backend = CpuBackend(CpuOptions(threads=1))
    parallel = ParallelOptions(1, 2, 1, "tcp://127.0.0.1:1", 1.0, 1.0)
    planned = plan_model(backend, LoadOptions(str(tiny), dtype="float32", parallel=parallel), silent)
    assert planned.plan.step_program.value is None
    assert "one of 2 ranks" in planned.plan.step_program.reason
    sizes = {(each.operator, each.where): each.sizes for each in planned.sites}
    assert sizes["attention_decode", "model.layers.0.self_attn"] == {"H": 2, "G": 1, "D": 8}
    assert sizes["linear", "model.layers.1.mlp.down_proj"] == {"N": 32, "K": 24}
    assert sizes["linear", "lm_head"] == {"N": 49, "K": 32}
    assert sizes["argmax", "sampling"] == {"V": 97}


def test_what_only_step_programs_offer_is_refused_to_ranks_with_the_cause(tiny: Path) -> None:
    report = CpuBackend(CpuOptions(threads=1)).capabilities()
    with pytest.raises(FailedPrecondition, match="step programs run whole models, and this is one of 2"):
        plan_execution(report, [], PlanRequest(dtype="float32", quantization="a8", ranks=2))


def test_a_layout_that_does_not_divide_the_model_is_refused_before_anybody_is_waited_for(tiny: Path) -> None:
    with pytest.raises(InvalidArgument, match="num_attention_heads 4") as refusal:
        load(tiny, ParallelOptions(0, 3, 1, "tcp://127.0.0.1:1", 3600.0, 1.0))
    assert refusal.value.field == "tensor_parallel_size"


def write_damaged(source: Path, folder: Path, name: str, column: int) -> Path:
    """The same model with one number that is none."""
    write_model(folder)
    tensors = load_file(source / "model.safetensors")
    tensors[name][0, column] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", [TWO, STAGES], ids=["tensor", "stages"])
def test_a_damaged_weight_of_one_rank_is_refused_by_all_with_its_place(
    tiny: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    """The last column of the last layer: the second rank's in both layouts."""
    name = "model.layers.1.mlp.down_proj"
    folder = write_damaged(tiny, tmp_path / "damaged", f"{name}.weight", 47)
    start = time.monotonic()
    errors = errors_of_ranks(layout, lambda parallel: load(folder, parallel))
    assert time.monotonic() - start < SOON_S
    for error in errors:
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "NON_FINITE_LOGITS"
        assert f"first in linear of {name} on rank 1;" in error.message


def test_ranks_with_different_weights_are_refused_on_all(tiny: Path, tmp_path: Path) -> None:
    other = write_weights(tmp_path / "other", seed=4)

    def work(parallel: ParallelOptions) -> object:
        return load((tiny, other)[parallel.rank], parallel)

    for error in errors_of_ranks(TWO, work):
        assert isinstance(error, FailedPrecondition)
        assert (error.reason, error.field) == ("RANKS_DIFFER", "model_path")
        assert "weights_version" in error.message


class FullMemory(CpuMemory):
    """Has room for a page, which the first forward pass takes, and for no cache."""

    def allocate(
        self, shape: Sequence[int], dtype: str, device: int | None = None, *, zeroed: bool = False
    ) -> Buffer:
        if shape[2] > 1:
            raise ResourceExhausted("2 pages do not fit")
        return super().allocate(shape, dtype, device, zeroed=zeroed)


def test_a_cache_that_one_rank_has_no_room_for_is_refused_on_all(tiny: Path) -> None:
    def work(parallel: ParallelOptions) -> None:
        backend = CpuBackend(CpuOptions(threads=1, kernel="off"))
        runner, _ = load(tiny, parallel, backend=backend)
        if parallel.rank == 1:
            backend._memory = FullMemory()
        runner.allocate_kv_cache(page_count=10, page_size=8, max_slots=2)

    first, second = errors_of_ranks(TWO, work)
    assert isinstance(first, ResourceExhausted)
    assert isinstance(second, ResourceExhausted)
    assert first.message == "rank 1 of the set cannot allocate its KV cache: 2 pages do not fit"
    assert second.message == "2 pages do not fit"


def test_a_rank_whose_step_fails_leaves_and_the_others_learn_of_it_at_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 samples, and has no memory left to do it; rank 1 waits for its tokens."""

    def out_of_memory(self: SlotSampling, *arguments: Any) -> Sampled:
        raise MemoryError("nothing left")

    def work(parallel: ParallelOptions) -> None:
        runner, _ = load(tiny, parallel)
        try:
            make(runner)
        finally:
            with pytest.raises(Unavailable) as second:
                runner.exchange("")
            assert second.value.reason == "RANK_LOST"

    monkeypatch.setattr(SlotSampling, "sample", out_of_memory)
    start = time.monotonic()
    first, second = errors_of_ranks(TWO, work)
    assert time.monotonic() - start < SOON_S
    assert isinstance(first, ResourceExhausted)
    assert isinstance(second, Unavailable)
    assert (second.reason, second.metadata["missing"]) == ("RANK_LOST", "0")


def test_a_rank_that_fails_while_it_loads_is_missed_at_once(tiny: Path) -> None:
    def work(parallel: ParallelOptions) -> None:
        def lose_the_disk(stage: str, share: float) -> None:
            if parallel.rank == 1 and stage == "weights":
                raise OSError("the disk is gone")

        runner = OperatorModelRunner(CpuBackend(CpuOptions(threads=1, kernel="off")))
        runner.load(LoadOptions(str(tiny), dtype="float32", parallel=parallel), lose_the_disk)

    start = time.monotonic()
    first, second = errors_of_ranks(TWO, work)
    assert time.monotonic() - start < SOON_S
    assert isinstance(second, OSError)
    assert isinstance(first, MeshError)
    assert (first.reason, first.metadata["missing"]) == ("RANK_LOST", "1")


def test_a_profile_shows_what_ranks_exchange(tiny: Path) -> None:
    def work(parallel: ParallelOptions) -> list[tuple[str, int, int]]:
        runner, _ = load(tiny, parallel)
        stop = runner.start_timing(most_runs=10)
        assert stop is not None
        make(runner, 4)
        return [
            (total.operator.name, total.calls, total.size_bytes)
            for total in stop().totals
            if total.operator.kind == COMMUNICATION
        ]

    # Thirteen tokens by fives and then three alone, over the embedding and both parts of two layers, 32 wide.
    steps, rows = 6, 16
    for seen in run_ranks(TWO, work):
        by_name = {name: (calls, size_bytes) for name, calls, size_bytes in seen}
        assert by_name["all_reduce"] == (5 * steps, 5 * rows * 32 * 4)
        assert by_name["broadcast"][0] == 4, "tokens are shared in steps that sample"


def probe_calls(folder: Path) -> Callable[[ParallelOptions], list[OperatorCall]]:
    """Calls of the first forward pass on a rank."""

    def work(parallel: ParallelOptions) -> list[OperatorCall]:
        backend = CpuBackend(CpuOptions(threads=1, kernel="off"))
        options = LoadOptions(str(folder), load_format="dummy", dtype="float32", parallel=parallel)
        planned = plan_model(backend, options, silent)
        ranks = join_ranks(backend, options, planned.device)
        assert ranks is not None
        calls: list[OperatorCall] = []
        model = replace(planned, links=ranks).build(
            ObservedOperators(planned.operators, calls.append), silent
        )
        _, layers = allocate_pages(
            backend, model.kv_shape, page_count=1, page_size=8, dtype="float32", device=0
        )
        run_probe(model, layers, vocab_size=97, dtype=torch.float32, page_size=8)
        ranks.exchange("")
        ranks.close()
        return calls

    return work


def test_each_choice_of_an_expert_is_computed_once_by_the_rank_that_holds_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **MIXTURE)
    by_rank = run_ranks(TWO, probe_calls(folder))
    tokens, chosen, layers = 8, 2, 2
    rows = 0
    for calls in by_rank:
        for call in calls:
            if call.name == "moe_experts":
                x, _, _, weights, ids = call.inputs
                rows += x.shape[0]
                assert weights.shape == ids.shape == (x.shape[0], 1)
                assert int(ids.max()) < 3
    assert rows == tokens * chosen * layers


@pytest.mark.nightly
def test_ranks_of_another_plugin_agree_and_are_planned_by_their_experts(tmp_path: Path) -> None:
    """The emulated chip: collectives, layouts of weights and of the cache, and experts, of its own."""
    sizes = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128, "num_experts": 8}
    folder = write_model(tmp_path / "model", **{**MIXTURE, **sizes})

    def work(parallel: ParallelOptions) -> tuple[list[int], LoadedModel]:
        runner = OperatorModelRunner(load_backend("kunlun", {"emulate": "true"}))
        model = runner.load(LoadOptions(str(folder), load_format="dummy", parallel=parallel), silent)
        runner.allocate_kv_cache(page_count=4, page_size=16, max_slots=2)
        driver = StepDriver(runner, page_count=4, page_size=16)
        [made] = driver.run([driver.admit(0, PROMPT, room=12, settings=sampled(3))], 12, chunk=5)
        runner.unload()
        return made, model

    (first, model), (second, _) = run_ranks(TWO, work)
    assert first == second
    assert model.numeric_class == "bfloat16+tp2"
    [experts] = [decision for decision in model.operators if decision.name == "moe_experts"]
    assert (experts.choice, experts.sizes["E"], experts.sizes["A"]) == ("fused", 4, 1)
