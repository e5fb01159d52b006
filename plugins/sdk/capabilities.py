"""The capability report: what a chip can do, in a frozen struct whose every default is the conservative
answer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from chipmesh.device.v1alpha1 import plugin_pb2
from plugins.sdk.step_program import StepProgramCapability


class Coverage(enum.Enum):
    """How an operator is covered."""

    NATIVE = "native"
    FUSED = "fused"
    REFERENCE = "reference"


_COVERAGE_PROTO = {
    Coverage.NATIVE: plugin_pb2.OperatorCapability.COVERAGE_NATIVE,
    Coverage.FUSED: plugin_pb2.OperatorCapability.COVERAGE_FUSED,
    Coverage.REFERENCE: plugin_pb2.OperatorCapability.COVERAGE_REFERENCE,
}


@dataclass(frozen=True)
class OperatorCapability:
    """One operator of the catalogue on this chip. `dtypes` empty: any compute dtype of the report."""

    name: str
    coverage: Coverage = Coverage.REFERENCE
    dtypes: Sequence[str] = ()
    constraints: Sequence[str] = ()
    """All must hold, for example "num_experts % 4 == 0"."""
    reason: str = ""

    def to_proto(self) -> plugin_pb2.OperatorCapability:
        """The message of the device contract."""
        return plugin_pb2.OperatorCapability(
            name=self.name,
            coverage=_COVERAGE_PROTO[self.coverage],
            dtypes=self.dtypes,
            constraints=self.constraints,
            reason=self.reason,
        )


@dataclass(frozen=True)
class LinkCapability:
    """A link to another device; 0 bytes per second: unknown."""

    peer_device: int
    bandwidth_bytes_per_second: int = 0

    def to_proto(self) -> plugin_pb2.LinkCapability:
        """The message of the device contract."""
        return plugin_pb2.LinkCapability(
            peer_device=self.peer_device, bandwidth_bytes_per_second=self.bandwidth_bytes_per_second
        )


@dataclass(frozen=True)
class CapabilityReport:
    """What a chip can do. It alone decides the execution plan; it never changes during an executor's life."""

    chip: str
    """Chip kind as shown to people; nothing is decided by it."""
    emulated: bool = False
    emulation_note: str = ""
    """What is emulated, in one sentence; empty unless emulated."""
    operators: Sequence[OperatorCapability] = ()
    compute_dtypes: Sequence[str] = ("float32",)
    """Best first; the first one is what dtype "auto" means."""
    accumulation_dtype: str = "float32"
    kv_cache_dtypes: Sequence[str] = ("float32",)
    """Best first."""
    kv_layout: str = ""
    quantization_formats: Sequence[str] = ()
    graph_capture: bool = False
    page_sizes_tokens: Sequence[int] = ()
    """Preferred first; empty: any."""
    preferred_chunk_tokens: int = 0
    """0: no preference."""
    preferred_batch_size: int = 0
    """0: no preference."""
    preferred_step_window_ms: int = 0
    """Decode steps that take so long together are best sent in one message, as where the chip computes on
    the processors that carry the messages. 0: no preference, each step is sent alone.
    """
    numeric_classes: Sequence[str] = ()
    collectives: Sequence[str] = ()
    overlap_rows: int = 0
    """Rows from which on a piece of a product is summed over ranks while the next is computed. 0: never.
    Read in the executor's process only, so not on the wire.
    """
    links: Sequence[LinkCapability] = ()
    step_programs: Sequence[StepProgramCapability] = ()
    """Patterns of models that run as one program; read in the executor's process only, so not on the wire."""

    def __post_init__(self) -> None:
        if not self.chip:
            raise ValueError("a capability report names its chip")
        if self.emulated != bool(self.emulation_note):
            raise ValueError("emulation_note says what is emulated exactly where emulated is true")

    def to_proto(self) -> plugin_pb2.CapabilityReport:
        """The message of the device contract."""
        return plugin_pb2.CapabilityReport(
            chip=self.chip,
            emulated=self.emulated,
            emulation_note=self.emulation_note,
            operators=[operator.to_proto() for operator in self.operators],
            compute_dtypes=self.compute_dtypes,
            accumulation_dtype=self.accumulation_dtype,
            kv_cache_dtypes=self.kv_cache_dtypes,
            kv_layout=self.kv_layout,
            quantization_formats=self.quantization_formats,
            graph_capture=self.graph_capture,
            page_sizes_tokens=self.page_sizes_tokens,
            preferred_chunk_tokens=self.preferred_chunk_tokens,
            preferred_batch_size=self.preferred_batch_size,
            preferred_step_window_ms=self.preferred_step_window_ms,
            numeric_classes=self.numeric_classes,
            collectives=self.collectives,
            links=[link.to_proto() for link in self.links],
        )
