"""The kit against a running executor by its address: the same checks, over RPCs, to the same results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from chipmesh.device.v1alpha1 import device_pb2, memory_pb2, plugin_pb2
from meshkit.cli.app import main
from plugins.conformance.checks_capabilities import COLLECTIVES
from plugins.conformance.kit import run_conformance, run_conformance_at
from plugins.conformance.remote import OUT_OF_REACH
from plugins.conformance.remote_report import (
    info_from_proto,
    properties_from_proto,
    report_from_proto,
    stats_from_proto,
)
from plugins.conformance.report import Fault, Report, Status
from plugins.sdk.backend import Backend
from plugins.sdk.tensors import CACHE_DTYPE_BYTES
from tests.conformance import liars
from tests.conformance.executors import running_executor, serving
from tests.conformance.liars import PlantedBackend


@pytest.fixture(scope="module")
def cpu_address() -> Iterator[str]:
    with running_executor("cpu") as address:
        yield address


@pytest.fixture(scope="module")
def there(cpu_address: str) -> Report:
    return run_conformance_at(cpu_address, quick=True)


def passed(report: Report, area: str) -> set[str]:
    return {each.name for each in report.results if each.status is Status.PASS and each.name.startswith(area)}


def caches_that_do_not_travel(names: Iterable[str]) -> set[str]:
    """Checks of caches in a dtype that no tensor of the contract has."""
    return {name for name in names if name.rpartition("/")[2] in CACHE_DTYPE_BYTES}


def test_the_cpu_plugin_passes_by_address_what_it_passes_here(there: Report) -> None:
    here = run_conformance("cpu", quick=True)
    assert there.failures == []
    assert len(passed(here, "operators/")) > 50
    for area in ("capabilities/", "device/", "memory/", "operators/"):
        by_value = passed(here, area) - caches_that_do_not_travel(passed(here, area))
        assert by_value - OUT_OF_REACH.keys() == passed(there, area)
    assert there.coverage == here.coverage
    assert passed(there, "collectives/") == {"collectives/one_rank"}


def test_what_the_wire_does_not_show_is_skipped_with_a_reason(there: Report) -> None:
    skipped = {each.name: each for each in there.results if each.status is Status.SKIP_OUT_OF_REACH}
    caches = caches_that_do_not_travel(skipped)
    assert len(caches) > 20
    assert skipped.keys() - caches == {*OUT_OF_REACH, *(f"collectives/{name}" for name in COLLECTIVES)}
    assert all(each.detail for each in skipped.values())
    assert there.to_json()["skip_out_of_reach"] == len(skipped)


def test_inputs_that_no_message_holds_are_skipped_and_do_not_count_as_tried(cpu_address: str) -> None:
    report = run_conformance_at(cpu_address, only="operators/embedding/")
    larger = {"operators/embedding/float32/vocabulary", "operators/embedding/bfloat16/vocabulary"}
    skipped = {each.name for each in report.results if each.status is Status.SKIP_OUT_OF_REACH}
    assert skipped == larger
    assert report.failures == []
    assert not {shape for name, _, shape in report.coverage.tried if name == "embedding"} & {"vocabulary"}
    assert ("embedding", "float32", "vocabulary") in report.coverage.declared


def test_the_hash_plugin_passes_by_address_what_it_declares() -> None:
    here = run_conformance("hash", quick=True)
    with running_executor("hash") as address:
        there = run_conformance_at(address, quick=True)
    assert there.failures == []
    assert passed(there, "") == passed(here, "") - OUT_OF_REACH.keys()
    assert (there.backend, there.identity["emulated"], there.identity["address"]) == ("hash", True, address)
    assert not [each for each in there.results if each.name == "operators/inputs_are_kept"]


@pytest.mark.parametrize(
    ("make", "only", "fault"),
    [
        (partial(PlantedBackend, operators=liars.WrongResult), "operators/silu_mul", Fault.WRONG_RESULT),
        (partial(PlantedBackend, operators=liars.WritesNextCell), "operators/write_kv",
         Fault.OUT_OF_BOUNDS_WRITE),
        (partial(PlantedBackend, operators=liars.NonDeterministic), "operators/add_rms_norm",
         Fault.NON_DETERMINISTIC),
        (partial(PlantedBackend, operators=liars.Missing, report=liars.all_native), "operators/linear/",
         Fault.DECLARED_BUT_MISSING),
        (partial(PlantedBackend, memory=liars.FlipsABit), "memory/copy", Fault.WRONG_RESULT),
        (lambda: PlantedBackend(devices=liars.ListsTooMany()), "device/count", Fault.WRONG_COUNT),
    ],
    ids=["result", "cell", "determinism", "missing", "bit flipped", "too many devices"],
)  # fmt: skip
def test_a_liar_fails_by_name_over_the_wire_too(make: Any, only: str, fault: Fault) -> None:
    backend: Backend = make()
    with serving(backend) as address:
        report = run_conformance_at(address, only=only, quick=True)
    assert {failure.fault for failure in report.failures} == {fault}
    assert all(failure.name.startswith(only) for failure in report.failures)


def test_the_command_checks_an_executor(cpu_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["conformance", "--address", cpu_address, "-k", "silu_mul", "--quick"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["backend"], told["address"], told["fail"]) == ("cpu", cpu_address, 0)
    assert told["pass"] == told["coverage"]["operators"]["silu_mul"]["tried"]
    assert main(words) == 0
    assert f"conformance of cpu at {cpu_address}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "--address"),
        (["--backend", "cpu", "--address", "127.0.0.1:1"], "--address"),
        (["--address", "nowhere"], "--address"),
        (["--address", "127.0.0.1:1", "--option", "threads=1"], "--option"),
        (["--address", "127.0.0.1:1", "--emulate"], "--option"),
    ],
    ids=["neither", "both", "no address", "option", "emulate"],
)
def test_a_wrong_choice_of_target_names_the_flag(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--json", *words]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


def test_nobody_at_the_address_is_an_error_and_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--json", "--address", "127.0.0.1:1"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "UNAVAILABLE"


# ---- from_proto


def fill(message: Message, number: int = 1) -> Message:
    """Sets every field, each to a value of its own."""
    for field in message.DESCRIPTOR.fields:
        number += 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[f"key {number}"] = f"value {number}"
        elif field.is_repeated:
            values = getattr(message, field.name)
            if field.message_type is None:
                values.append(scalar(field, number))
            else:
                fill(values.add(), number)
        else:
            setattr(message, field.name, scalar(field, number))
    return message


def scalar(field: Any, number: int) -> Any:
    kinds = {FieldDescriptor.CPPTYPE_STRING: f"text {number}", FieldDescriptor.CPPTYPE_BOOL: True}
    if field.enum_type is not None:
        return field.enum_type.values[1].number
    return kinds.get(field.cpp_type, number)


def test_no_field_of_a_message_is_lost() -> None:
    report = fill(plugin_pb2.CapabilityReport())
    assert report_from_proto(report).to_proto() == report  # type: ignore[arg-type]
    properties = fill(device_pb2.DeviceProperties())
    assert properties_from_proto(properties).to_proto() == properties  # type: ignore[arg-type]
    stats = fill(memory_pb2.GetStatsResponse())
    assert stats_from_proto(stats).to_proto() == stats  # type: ignore[arg-type]
    message = plugin_pb2.GetPluginInfoResponse()
    fill(message)
    info = info_from_proto(message)
    for field in message.DESCRIPTOR.fields:
        if field.name != "instance_id":
            assert getattr(info, field.name) == getattr(message, field.name)


def test_an_entry_that_does_not_say_how_it_is_covered_is_refused() -> None:
    entry = plugin_pb2.OperatorCapability(name="linear")
    with pytest.raises(ValueError, match="'linear' has coverage 0"):
        report_from_proto(plugin_pb2.CapabilityReport(chip="x", operators=[entry]))
