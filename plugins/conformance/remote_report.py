"""Messages of the device contract as the SDK's own classes: the opposite of their `to_proto`. No torch."""

from __future__ import annotations

from chipmesh.device.v1alpha1 import device_pb2, memory_pb2, plugin_pb2
from plugins.sdk.backend import PluginInfo
from plugins.sdk.capabilities import CapabilityReport, Coverage, LinkCapability, OperatorCapability
from plugins.sdk.device import DeviceProperties
from plugins.sdk.memory import MemoryStats

_COVERAGE = {
    plugin_pb2.OperatorCapability.COVERAGE_NATIVE: Coverage.NATIVE,
    plugin_pb2.OperatorCapability.COVERAGE_FUSED: Coverage.FUSED,
    plugin_pb2.OperatorCapability.COVERAGE_REFERENCE: Coverage.REFERENCE,
}


def info_from_proto(message: plugin_pb2.GetPluginInfoResponse) -> PluginInfo:
    """Who an executor's plugin is. The ranges that it was built for stay empty: they do not travel, and the
    executor has checked them when it loaded the plugin.
    """
    return PluginInfo(
        name=message.name,
        plugin_version=message.plugin_version,
        contract_version=message.contract_version,
        runtime_version=message.runtime_version,
        collective_library_version=message.collective_library_version,
        framework_version=message.framework_version,
        contract_range="",
    )


def report_from_proto(message: plugin_pb2.CapabilityReport) -> CapabilityReport:
    """The report of a chip.

    Raises:
        ValueError: it names no chip, says of an operator not how it is covered, or contradicts itself.
    """
    return CapabilityReport(
        chip=message.chip,
        emulated=message.emulated,
        emulation_note=message.emulation_note,
        operators=tuple(operator_from_proto(each) for each in message.operators),
        compute_dtypes=tuple(message.compute_dtypes),
        accumulation_dtype=message.accumulation_dtype,
        kv_cache_dtypes=tuple(message.kv_cache_dtypes),
        kv_layout=message.kv_layout,
        quantization_formats=tuple(message.quantization_formats),
        graph_capture=message.graph_capture,
        page_sizes_tokens=tuple(message.page_sizes_tokens),
        preferred_chunk_tokens=message.preferred_chunk_tokens,
        preferred_batch_size=message.preferred_batch_size,
        preferred_step_window_ms=message.preferred_step_window_ms,
        numeric_classes=tuple(message.numeric_classes),
        collectives=tuple(message.collectives),
        links=tuple(
            LinkCapability(link.peer_device, link.bandwidth_bytes_per_second) for link in message.links
        ),
    )


def operator_from_proto(message: plugin_pb2.OperatorCapability) -> OperatorCapability:
    """One operator's entry. Raises ValueError where it does not say how the operator is covered."""
    coverage = _COVERAGE.get(message.coverage)
    if coverage is None:
        raise ValueError(f"operator {message.name!r} has coverage {message.coverage}, which is none")
    return OperatorCapability(
        name=message.name,
        coverage=coverage,
        dtypes=tuple(message.dtypes),
        constraints=tuple(message.constraints),
        reason=message.reason,
    )


def properties_from_proto(message: device_pb2.DeviceProperties) -> DeviceProperties:
    """What a device says of itself."""
    return DeviceProperties(
        index=message.index,
        name=message.name,
        memory_total_bytes=message.memory_total_bytes,
        memory_free_bytes=message.memory_free_bytes,
        compute_units=message.compute_units,
        attributes=dict(message.attributes),
    )


def stats_from_proto(message: memory_pb2.GetStatsResponse) -> MemoryStats:
    """Use of a device's memory."""
    return MemoryStats(
        total_bytes=message.total_bytes,
        free_bytes=message.free_bytes,
        allocated_bytes=message.allocated_bytes,
        pooled_bytes=message.pooled_bytes,
        peak_allocated_bytes=message.peak_allocated_bytes,
    )
