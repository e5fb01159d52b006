"""Which models the native kernel serves, and what is said where it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshkit.errors import FailedPrecondition, InvalidArgument
from plugins.cpu.native import build, loading
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.planning import PlanRequest, plan_execution
from plugins.sdk.registry import load_backend
from plugins.sdk.report_checks import find_contradictions
from plugins.sdk.runner import LoadedModel, LoadOptions
from plugins.sdk.step_program import A8, LLAMA, DecoderShape, StepProgramCapability
from tests.unit.cpu_plugin.decoder_samples import SHAPE
from tests.unit.models.tiny_llama import write_model
from worker_svc.model_runner import OperatorModelRunner

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def report_of(kernel: str = "auto") -> CapabilityReport:
    return CpuBackend(CpuOptions(threads=1, kernel=kernel)).capabilities()


def choice(report: CapabilityReport, shape: DecoderShape | None = SHAPE, **request: Any) -> tuple[Any, str]:
    """(pattern or None, reason)."""
    chosen = plan_execution(report, [], PlanRequest(**request), shape=shape).step_program
    return chosen.value, chosen.reason


def load(folder: Path, kernel: str = "auto", **options: Any) -> LoadedModel:
    runner = OperatorModelRunner(CpuBackend(CpuOptions(threads=1, kernel=kernel)))
    loaded = runner.load(LoadOptions(str(folder), load_format="dummy", **options), lambda stage, share: None)
    runner.unload()
    return loaded


def test_a_llama_in_float32_runs_as_one_program() -> None:
    value, reason = choice(report_of())
    assert value == LLAMA
    assert "threads: 1" in reason


@pytest.mark.parametrize(
    ("changes", "request_", "said"),
    [
        ({}, {"dtype": "bfloat16"}, "not bfloat16"),
        ({}, {"kv_cache_dtype": "bf16"}, "caches in float32"),
        ({}, {"quantization": "w4a16"}, "w4a16"),
        ({"head_dim": 24, "hidden": 96}, {}, "D is 24"),
        ({"inner": 100}, {}, "I is 100"),
        ({"heads": 34}, {}, "H is 34"),
        ({"pattern": "mamba"}, {}, "mamba"),
    ],
)
def test_what_the_kernel_does_not_cover_runs_by_operators_and_says_why(
    changes: dict[str, Any], request_: dict[str, Any], said: str
) -> None:
    value, reason = choice(report_of(), replace(SHAPE, **changes), **request_)
    assert value is None
    assert said in reason
    assert reason.endswith("by operators")


def test_a_model_of_no_known_pattern_runs_by_operators() -> None:
    assert choice(report_of(), None)[0] is None


def test_the_kernel_can_be_switched_off() -> None:
    value, reason = choice(report_of("off"))
    assert value is None
    assert "backend option kernel" in reason


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="avx512") as caught:
        load_backend("cpu", {"kernel": "mmx"})
    assert caught.value.field == "backend_options.kernel"


def test_without_a_compiler_operators_serve_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    loading.load_kernel.cache_clear()
    try:
        value, reason = choice(report_of())
        with pytest.raises(FailedPrecondition, match="no C\\+\\+ compiler"):
            report_of("baseline")
        loaded = load(write_model(tmp_path / "model", **SIZES))
    finally:
        loading.load_kernel.cache_clear()
    assert value is None
    assert "no C++ compiler" in reason
    assert "rms_norm" in {each.name for each in loaded.operators}


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such flag' >&2\nexit 3\n")
    broken.chmod(0o755)
    compiler = build.find_compiler(str(broken))
    with pytest.raises(build.BuildFailed, match="no such flag"):
        build.build_library(tmp_path / "cache" / build.LIBRARY_NAME, compiler)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / build.LIBRARY_NAME
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(loading, "_PACKAGED", damaged)
    loading.load_kernel.cache_clear()
    try:
        kernel = loading.load_kernel()
    finally:
        loading.load_kernel.cache_clear()
    assert kernel.library is None
    assert str(damaged) in kernel.problem


def test_the_key_of_a_build_changes_with_sources_and_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = build.find_compiler()
    before = build.build_key(compiler)
    assert before == build.build_key(compiler)
    assert before != build.build_key(replace(compiler, version="another"))
    (tmp_path / "step.cpp").write_text("// changed")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert before != build.build_key(compiler)


def test_a_loaded_model_says_what_serves_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **SIZES)
    native, operators = load(folder), load(folder, kernel="off")
    assert (native.operators[0].name, native.operators[0].choice) == ("llama_step", "fused")
    assert {each.name for each in native.operators[1:]} == {"argmax", "sample"}
    assert "llama_step" not in {each.name for each in operators.operators}
    assert native.kv_bytes_per_token == operators.kv_bytes_per_token
    assert native.numeric_class == operators.numeric_class == "float32"
    assert native.kv_layout != operators.kv_layout


A8_LOADED = "float32+a8"


def test_a_program_says_which_quantizations_it_offers() -> None:
    (entry,) = report_of().step_programs
    assert tuple(entry.quantizations) == ("", A8)
    _, reason = choice(report_of())
    assert f"quantizations: {A8}" in reason


def test_rows_in_int8_are_a_class_of_numerics_of_their_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **SIZES)
    loaded, plain = load(folder, quantization=A8), load(folder)
    assert (loaded.numeric_class, plain.numeric_class) == (A8_LOADED, "float32")
    assert loaded.operators[0].name == "llama_step"
    assert loaded.weights_version == plain.weights_version


@pytest.mark.parametrize(
    ("kernel", "sizes", "options", "said"),
    [
        ("off", {}, {}, "backend option kernel"),
        ("auto", {}, {"dtype": "bfloat16"}, "not bfloat16"),
        ("auto", {}, {"kv_cache_dtype": "bf16"}, "caches in float32"),
        ("auto", {"intermediate_size": 100}, {}, "I is 100"),
    ],
)
def test_rows_in_int8_are_refused_where_the_program_cannot_serve(
    tmp_path: Path, kernel: str, sizes: dict[str, int], options: dict[str, str], said: str
) -> None:
    folder = write_model(tmp_path / "model", **{**SIZES, **sizes})
    with pytest.raises(FailedPrecondition, match=said) as caught:
        load(folder, kernel, quantization=A8, **options)
    assert (caught.value.field, caught.value.reason) == ("quantization", "QUANTIZATION_UNSUPPORTED")
    assert "leave quantization out" in caught.value.message


def test_rows_in_int8_are_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    loading.load_kernel.cache_clear()
    try:
        with pytest.raises(FailedPrecondition, match="no C\\+\\+ compiler") as caught:
            choice(report_of(), quantization=A8)
    finally:
        loading.load_kernel.cache_clear()
    assert caught.value.field == "quantization"


@pytest.mark.parametrize(("backend", "said"), [("kunlun", "no step programs"), ("hash", "no step programs")])
def test_rows_in_int8_are_refused_by_plugins_without_programs(backend: str, said: str) -> None:
    options = {"emulate": "true"} if backend == "kunlun" else {}
    with pytest.raises(FailedPrecondition, match=said) as caught:
        choice(load_backend(backend, options).capabilities(), quantization=A8, dtype="auto")
    assert caught.value.field == "quantization"


def test_a_program_that_does_not_offer_it_is_named() -> None:
    report = report_of()
    without = replace(
        report, step_programs=[replace(each, quantizations=("",)) for each in report.step_programs]
    )
    with pytest.raises(FailedPrecondition, match="has no a8 products"):
        choice(without, quantization=A8)


def test_a_report_whose_programs_contradict_it_is_found() -> None:
    entry = StepProgramCapability(
        "llm",
        dtypes=("float8",),
        kv_cache_dtypes=("int4",),
        constraints=("Z % 2 == 0",),
        quantizations=("a9",),
    )
    found = "; ".join(find_contradictions(replace(report_of(), step_programs=(entry,))))
    for word in ("llm", "float8", "int4", "kv_layout", "Z", "a9"):
        assert word in found
