"""The report's defaults are conservative, and it travels whole."""

from __future__ import annotations

import pytest

from chipmesh.device.v1alpha1 import plugin_pb2
from plugins.sdk.capabilities import CapabilityReport, Coverage, LinkCapability, OperatorCapability


def test_a_report_that_says_nothing_promises_nothing() -> None:
    proto = CapabilityReport(chip="toy").to_proto()
    assert proto.compute_dtypes == ["float32"]
    assert not proto.graph_capture
    assert not proto.operators
    assert not proto.collectives
    assert OperatorCapability("linear").coverage is Coverage.REFERENCE


def test_every_field_travels() -> None:
    report = CapabilityReport(
        chip="toy",
        emulated=True,
        emulation_note="runs on the host",
        operators=[OperatorCapability("linear", Coverage.NATIVE, ["int8"], ["in % 4 == 0"], "fast")],
        compute_dtypes=["bfloat16"],
        accumulation_dtype="float64",
        kv_cache_dtypes=["int8"],
        kv_layout="layout",
        quantization_formats=["q8_0"],
        graph_capture=True,
        page_sizes_tokens=[16],
        preferred_chunk_tokens=512,
        preferred_batch_size=64,
        preferred_step_window_ms=20,
        numeric_classes=["bfloat16"],
        collectives=["barrier"],
        links=[LinkCapability(1, 10)],
    )
    proto = report.to_proto()
    assert len(proto.ListFields()) == len(plugin_pb2.CapabilityReport.DESCRIPTOR.fields)
    assert proto.operators[0].coverage == plugin_pb2.OperatorCapability.COVERAGE_NATIVE
    assert proto.operators[0].constraints == ["in % 4 == 0"]
    assert proto.links[0].peer_device == 1


def test_an_emulation_says_what_it_emulates() -> None:
    with pytest.raises(ValueError, match="emulation_note"):
        CapabilityReport(chip="toy", emulated=True)
    with pytest.raises(ValueError, match="chip"):
        CapabilityReport(chip="")
