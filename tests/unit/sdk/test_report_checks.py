"""Every contradiction of a report is found and named; sound reports have none."""

from __future__ import annotations

import dataclasses
from typing import Any

import gguf
import pytest

from plugins.sdk.capabilities import CapabilityReport, Coverage, LinkCapability, OperatorCapability
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.registry import load_backend
from plugins.sdk.report_checks import QUANTIZATION_FORMATS, find_contradictions

CACHE = ("write_kv", "attention_prefill", "attention_decode")


def native(name: str, *constraints: str, dtypes: tuple[str, ...] = ()) -> OperatorCapability:
    """An operator of the plugin's own."""
    return OperatorCapability(name, Coverage.NATIVE, dtypes, constraints)


SOUND = CapabilityReport(
    chip="toy",
    operators=(
        native("linear", "K % 8 == 0", dtypes=("bfloat16",)),
        native("argmax", dtypes=("float32",)),
        *(native(name, "S in (16, 64)", "D <= 128") for name in CACHE),
        OperatorCapability("sample", reason="no float64"),
    ),
    compute_dtypes=("bfloat16", "float16"),
    kv_cache_dtypes=("bfloat16", "int8", "float8_e4m3fn"),
    kv_layout="layer_kv_page_token_head",
    quantization_formats=("w8a8", "w4a16", "q8_0"),
    page_sizes_tokens=(16, 64),
    numeric_classes=("bfloat16", "w8a8"),
    collectives=("all_reduce", "barrier"),
    links=(LinkCapability(1, 10**9),),
)


def change(**changes: Any) -> CapabilityReport:
    """The sound report but for `changes`."""
    return dataclasses.replace(SOUND, **changes)


def add(*entries: OperatorCapability) -> CapabilityReport:
    """The sound report with more operators."""
    return change(operators=(*SOUND.operators, *entries))


def only(entry: OperatorCapability) -> CapabilityReport:
    """The sound report with a single operator, and a KV cache that needs none."""
    return change(operators=(entry,), kv_cache_dtypes=("float16",))


def without(name: str) -> CapabilityReport:
    """The sound report in which an operator runs on the reference."""
    entries = [entry for entry in SOUND.operators if entry.name != name]
    return change(operators=(*entries, OperatorCapability(name, reason="not yet")))


def with_note(report: CapabilityReport) -> CapabilityReport:
    """With a note on an emulation that is none, as a class that is no dataclass may hold it."""
    object.__setattr__(report, "emulation_note", "a note")
    return report


def test_a_sound_report_has_no_contradiction() -> None:
    assert find_contradictions(SOUND, device_count=2) == []
    assert find_contradictions(CapabilityReport(chip="toy"), device_count=1) == []


@pytest.mark.parametrize(("name", "options"), [("cpu", {}), ("hash", {}), ("kunlun", {"emulate": "true"})])
def test_the_plugins_that_ship_are_sound(name: str, options: dict[str, str]) -> None:
    backend = load_backend(name, options)
    count = len(backend.devices.list_devices())
    assert find_contradictions(backend.capabilities(), device_count=count) == []


CONTRADICTIONS = {
    "unknown operator": (add(native("conv3d")), "operator 'conv3d' is not in the catalogue"),
    "operator twice": (add(native("linear")), "operator 'linear' comes 2 times"),
    "unknown compute dtype": (
        change(compute_dtypes=("bfloat16", "float16", "float7")),
        "compute_dtypes has 'float7', which the contract does not know",
    ),
    "compute dtype twice": (
        change(compute_dtypes=("bfloat16", "float16", "bfloat16")), "compute_dtypes: 'bfloat16' comes 2 times"
    ),
    "no kv dtype": (change(kv_cache_dtypes=()), "kv_cache_dtypes is empty"),
    "unknown kv dtype": (change(kv_cache_dtypes=("float16", "fp8_e4m3")), "kv_cache_dtypes has 'fp8_e4m3'"),
    "accumulation": (change(accumulation_dtype="int32"), "accumulation_dtype 'int32' is no float dtype"),
    "layout": (change(kv_layout=""), "kv_layout is empty, and operators are native"),
    "page size 0": (change(page_sizes_tokens=(16, 0)), "page_sizes_tokens has 0"),
    "page size twice": (change(page_sizes_tokens=(64, 64)), "page_sizes_tokens: 64 comes 2 times"),
    "chunk": (change(preferred_chunk_tokens=-1), "preferred_chunk_tokens is -1"),
    "batch": (change(preferred_batch_size=-8), "preferred_batch_size is -8"),
    "window": (change(preferred_step_window_ms=-1), "preferred_step_window_ms is -1"),
    "unreadable constraint": (
        add(native("silu_mul", "open('x')")), "silu_mul: constraint \"open('x')\" cannot be read"
    ),
    "foreign symbol": (add(native("silu_mul", "K == 8")), "silu_mul: constraint 'K == 8' cannot be read"),
    "no shape class left": (
        add(native("silu_mul", "I == 1", "I > 1")), "the constraints I == 1, I > 1 leave no shape class"
    ),
    "step size": (add(native("silu_mul", "T % 8 == 0")), "constraint 'T % 8 == 0' names T, a size of a step"),
    "rows": (only(native("argmax", "R < 1000")), "constraint 'R < 1000' names R, a size"),
    "page size excluded": (
        only(native("write_kv", "S > 16")), "write_kv: constraint 'S > 16' excludes the page size 16"
    ),
    "reference without a reason": (add(OperatorCapability("silu_mul")), "silu_mul: runs on the reference"),
    "dtype the chip lacks": (
        add(native("silu_mul", dtypes=("float32", "float16"))), "covers dtypes that the chip lacks: float32"
    ),
    "dtype of an operator with its own": (
        only(native("argmax", dtypes=("int8",))), "argmax: covers dtypes that the chip lacks: int8"
    ),
    "dtypes of an operator twice": (
        add(native("silu_mul", dtypes=("float16", "float16"))), "silu_mul: dtypes: 'float16' comes 2 times"
    ),
    "absent peer": (change(links=(LinkCapability(2),)), "device 2, which is not there (the plugin lists 2)"),
    "negative peer": (change(links=(LinkCapability(-1),)), "device -1, which is not there"),
    "bandwidth": (change(links=(LinkCapability(1, -5),)), "has -5 bytes per second"),
    "collective": (change(collectives=("all_to_all",)), "collectives has 'all_to_all'"),
    "overlap without async sums": (
        change(overlap_rows=64),
        "overlap_rows is 64, and async_all_reduce is not declared",
    ),
    "overlap of less than no rows": (change(overlap_rows=-1), "overlap_rows is -1"),
    "collective twice": (change(collectives=("barrier", "barrier")), "collectives: 'barrier' comes 2 times"),
    "format": (change(quantization_formats=("q9_9",)), "quantization_formats has 'q9_9'"),
    "numeric class": (change(numeric_classes=("float64",)), "numeric_classes names 'float64'"),
    "empty numeric class": (change(numeric_classes=("",)), "numeric_classes names ''"),
    "note": (with_note(change()), "emulated is False, emulation_note is 'a note'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_each_contradiction_is_found_alone_and_named(name: str) -> None:
    report, words = CONTRADICTIONS[name]
    (found,) = find_contradictions(report, device_count=2)
    assert words in found


@pytest.mark.parametrize("name", CACHE)
def test_a_cache_dtype_that_is_no_compute_dtype_needs_operators_that_convert(name: str) -> None:
    assert find_contradictions(without(name), device_count=2) == [
        f"kv_cache_dtypes has {dtype!r}, which is no compute dtype, and no operator converts to it: {name} "
        "not native"
        for dtype in ("int8", "float8_e4m3fn")
    ]


def test_a_chip_of_one_page_size_that_no_shape_class_has_is_sound() -> None:
    entries = [native(name, "S == 48") for name in CACHE]
    assert find_contradictions(change(operators=entries, page_sizes_tokens=(48,))) == []
    found = find_contradictions(change(operators=entries, page_sizes_tokens=()))
    assert [each.split(":")[0] for each in found] == list(CACHE), "any page size is offered, but none works"


def test_a_runner_of_its_own_converts_by_itself() -> None:
    report = CapabilityReport(chip="toy", kv_cache_dtypes=("uint8",))
    assert find_contradictions(report) == []


def test_a_report_without_compute_dtypes_says_that_first() -> None:
    found = find_contradictions(change(compute_dtypes=()), device_count=2)
    assert found[0] == "compute_dtypes is empty"


def test_all_contradictions_are_told_at_once() -> None:
    report = change(links=(LinkCapability(7),), collectives=("sum",), page_sizes_tokens=(16, -1, -1))
    assert len(find_contradictions(report, device_count=2)) == 4


def test_links_are_not_checked_against_devices_that_nobody_counted() -> None:
    assert find_contradictions(change(links=(LinkCapability(7),))) == []


@pytest.mark.parametrize("symbol", ["T", "B", "X", "M", "P", "R"])
def test_no_operator_may_be_constrained_by_a_size_of_a_step(symbol: str) -> None:
    constrained = [spec for spec in CATALOGUE.values() if symbol in spec.shape_classes[0].sizes]
    assert constrained
    for spec in constrained:
        report = change(
            operators=(native(spec.name, f"{symbol} >= 0"),),
            kv_cache_dtypes=("float16",),
            page_sizes_tokens=(),
        )
        (found,) = find_contradictions(report, device_count=2)
        assert f"{spec.name}: constraint '{symbol} >= 0' names {symbol}, a size of a step" in found


def test_the_formats_of_gguf_files_are_those_that_gguf_has() -> None:
    names = {kind.name.lower() for kind in gguf.GGMLQuantizationType}
    assert QUANTIZATION_FORMATS - names == {"w8a8", "w4a16"}


def test_a_field_of_another_kind_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        find_contradictions(change(page_sizes_tokens=("16",)))
