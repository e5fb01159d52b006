"""The plugins that ship: cpu passes in full, hash in what it declares; and the command that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshkit.cli.app import main
from meshkit.errors import FailedPrecondition
from plugins.conformance.kit import NO_HARDWARE, run_conformance
from plugins.conformance.report import Fault, Report, Status, write_junit
from plugins.sdk.backend import Backend
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.catalogue import CATALOGUE
from tests.conformance.liars import (
    NoDevices,
    PlainMemory,
    PlantedBackend,
    ReferenceAsNative,
    WrongResult,
    with_float16,
)

Check = Callable[..., Report]

_BY_PARTS = ("qkv_rotary", "moe_experts", "moe_experts_w8a8", "moe_experts_w4a16")
"""Operators that the cpu plugin runs as their parts, which it has."""


def test_the_cpu_plugin_passes() -> None:
    report = run_conformance("cpu", quick=True)
    assert report.failures == []
    assert report.count(Status.SKIP_NO_HARDWARE) == 0
    undeclared = {result.name for result in report.results if result.status is Status.SKIP_UNDECLARED}
    assert undeclared == {f"operators/{name}" for name in _BY_PARTS}
    heavy = sum(
        each.heavy for spec in CATALOGUE.values() for each in spec.shape_classes if spec.name not in _BY_PARTS
    )
    untried = report.coverage.declared - report.coverage.tried
    assert {shape for _, _, shape in untried} == {"prefill_long", "batch_long", "vocabulary"}
    assert heavy <= len(untried) <= 2 * heavy
    assert {name.split("/")[0] for name in (result.name for result in report.results)} == {
        "capabilities", "device", "memory", "operators", "collectives"
    }  # fmt: skip


@pytest.mark.nightly
def test_the_cpu_plugin_passes_in_every_shape_class() -> None:
    report = run_conformance("cpu", only="operators/")
    assert report.failures == []
    assert report.coverage.tried == report.coverage.declared


def test_the_reference_passes_its_own_kit_in_every_dtype(check: Check) -> None:
    make = partial(PlantedBackend, operators=ReferenceAsNative, memory=PlainMemory, report=with_float16)
    report = check(make, "operators/")
    assert report.failures == []
    assert {dtype for _, dtype, _ in report.coverage.tried} == {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize("name", ["write_kv", "attention_prefill", "attention_decode"])
def test_a_cache_of_a_shorter_dtype_is_no_fault(check: Check, name: str) -> None:
    make = partial(PlantedBackend, report=lambda report: replace(report, kv_cache_dtypes=("bfloat16",)))
    report = check(make, f"operators/{name}/float32")
    assert report.results
    assert report.failures == []


def test_the_hash_plugin_passes_in_what_it_declares() -> None:
    report = run_conformance("hash")
    assert report.failures == []
    skipped = {result.name for result in report.results if result.status is Status.SKIP_UNDECLARED}
    assert {f"operators/{name}" for name in CATALOGUE} <= skipped
    assert "collectives/all_reduce" in skipped
    assert report.identity["emulated"] is True


class _WithoutDevices(PlantedBackend):
    def __init__(self) -> None:
        super().__init__(devices=NoDevices())


def test_a_plugin_without_devices_is_skipped_and_never_passes(check: Check) -> None:
    report = check(_WithoutDevices)
    assert {result.status for result in report.results} == {Status.SKIP_NO_HARDWARE}
    assert report.identity["chip"] == "cpu"


@pytest.mark.parametrize("reason", NO_HARDWARE)
def test_a_chip_that_is_not_here_is_skipped_and_never_passes(check: Check, reason: str) -> None:
    def refuse() -> Backend:
        raise FailedPrecondition("no such chip on this machine", reason=reason)

    report = check(refuse, "operators/linear")
    assert report.count(Status.PASS) == 0
    assert {result.status for result in report.results} == {Status.SKIP_NO_HARDWARE}
    assert report.to_json()["skip_no_hardware"] == len(report.results)


class _WithoutReport(PlantedBackend):
    def capabilities(self) -> CapabilityReport:
        raise RuntimeError("the driver\x00 is asleep")


def test_a_plugin_that_cannot_be_asked_fails_in_one_result(check: Check, tmp_path: Path) -> None:
    report = check(_WithoutReport, "operators/")
    assert [(one.name, one.fault) for one in report.results] == [("capabilities/can_be_read", Fault.RAISED)]
    write_junit(report, tmp_path / "report.xml")
    failure = ElementTree.parse(tmp_path / "report.xml").getroot().find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == "RuntimeError: the driver  is asleep"


def test_the_command_prints_json_and_writes_junit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "report.xml"
    words = ["conformance", "--backend", "cpu", "--json", "--quick", "-k", "operators/rms_norm"]
    assert main([*words, "--junit", str(junit)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["pass"], told["skip"], told["fail"]) == (10, 0, 0)
    assert told["coverage"]["operators"]["rms_norm"]["tried"] == 10
    suite = ElementTree.parse(junit).getroot()
    assert suite.attrib["tests"] == "10"
    assert len(suite.findall("testcase")) == 10


def test_the_command_shows_a_table_and_fails_on_any_failure(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(partial(PlantedBackend, operators=WrongResult), "operators/none/")
    junit = tmp_path / "report.xml"
    words = ["conformance", "--backend", "planted", "--quick", "-k", "silu_mul", "--junit", str(junit)]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "operators/silu_mul" in shown
    assert "FAIL operators/silu_mul/float32/prefill: WRONG_RESULT" in shown
    failures = ElementTree.parse(junit).getroot().findall("testcase/failure")
    assert {failure.attrib["type"] for failure in failures} == {"WRONG_RESULT"}


def test_an_unknown_back_end_is_a_usage_error_that_lists_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["conformance", "--backend", "abacus", "--json"]) == 2
    printed = capsys.readouterr()
    assert "cpu" in printed.err
    assert json.loads(printed.out)["error"]["reason"] == "UNKNOWN_BACKEND"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--option", "threads"], "--option"),
        (["--option", "turbo=1"], "--option"),
        (["-k", "no such check"], "--only"),
        (["-k", "capabilities/sizes", "--junit", "/nowhere/report.xml"], "--junit"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["conformance", "--backend", "cpu", "--quick", "--json", *flags])
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field
    assert code == 2
