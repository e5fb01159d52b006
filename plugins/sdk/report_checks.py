"""What a capability report may not say: all that contradicts itself, the catalogue or the devices. No torch.

`load_backend` refuses such a report; `chipmesh conformance` shows each contradiction under its check's name.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.collectives import ASYNC_ALL_REDUCE
from plugins.sdk.op_spec import UNIT_ROUNDOFF, OpSpec, holds, symbols_of
from plugins.sdk.step_program import PATTERNS, PROGRAM_QUANTIZATIONS, SYMBOLS
from plugins.sdk.tensors import CACHE_DTYPE_BYTES, DTYPE_BYTES

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", ASYNC_ALL_REDUCE)
"""The primitives of the contract; the last one is `begin_all_reduce` that returns before the others come."""

QUANTIZATION_FORMATS = frozenset((
    "w8a8", "w4a16",
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k", "q1_0", "tq1_0", "tq2_0", "mxfp4", "nvfp4",
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs",
))  # fmt: skip
"""The framework's two, then those of GGUF files, by their names there in lower case."""

CACHE_DTYPES = (*DTYPE_BYTES, *CACHE_DTYPE_BYTES)
"""Dtypes that a cell of the KV cache may have: some, no tensor of the contract has."""

_PAGE_SIZE = "S"
_CACHE_OPERATORS = ("write_kv", "attention_prefill", "attention_decode")


def find_contradictions(report: CapabilityReport, *, device_count: int | None = None) -> list[str]:
    """Every contradiction, each a clause that names the field and the value; empty for a sound report.

    device_count: devices that the plugin lists, for links; None: not known.

    Raises:
        TypeError: a field holds something of another kind than its type says.
    """
    return [
        *find_in_emulation(report),
        *find_in_precisions(report),
        *find_in_sizes(report, device_count=device_count),
        *find_in_operators(report),
        *find_in_programs(report),
        *find_in_collectives(report),
    ]


def native_operators(report: CapabilityReport) -> list[str]:
    """Operators that the report declares as the plugin's own."""
    return [entry.name for entry in report.operators if entry.coverage is not Coverage.REFERENCE]


def find_in_emulation(report: CapabilityReport) -> list[str]:
    """Emulated without a note, or a note alone."""
    if report.emulated == bool(report.emulation_note):
        return []
    return [f"emulated is {report.emulated}, emulation_note is {report.emulation_note!r}"]


def find_in_precisions(report: CapabilityReport) -> list[str]:
    """Dtypes, accumulation, KV layout, quantisation formats and classes of numerics."""
    found = _in_dtypes("compute_dtypes", report.compute_dtypes, DTYPE_BYTES)
    found += _in_dtypes("kv_cache_dtypes", report.kv_cache_dtypes, CACHE_DTYPES)
    found += _in_cache_conversion(report)
    if native_operators(report):
        if report.accumulation_dtype not in UNIT_ROUNDOFF:
            found.append(f"accumulation_dtype {report.accumulation_dtype!r} is no float dtype")
        if not report.kv_layout:
            found.append("kv_layout is empty, and operators are native")
    found += _in_names("quantization_formats", report.quantization_formats, QUANTIZATION_FORMATS)
    # Classes are the plugin's own words, but one that is a dtype's name says that the chip computes in it.
    found += _twice("numeric_classes", report.numeric_classes)
    found += [
        f"numeric_classes names {name!r}, in which the chip does not compute"
        for name in report.numeric_classes
        if not name or (name in DTYPE_BYTES and name not in report.compute_dtypes)
    ]
    return found


def find_in_sizes(report: CapabilityReport, *, device_count: int | None = None) -> list[str]:
    """Page sizes, preferred sizes and links."""
    found = [f"page_sizes_tokens has {size}" for size in dict.fromkeys(report.page_sizes_tokens) if size <= 0]
    found += _twice("page_sizes_tokens", report.page_sizes_tokens)
    for field in ("preferred_chunk_tokens", "preferred_batch_size", "preferred_step_window_ms"):
        if (size := getattr(report, field)) < 0:
            found.append(f"{field} is {size}")
    for link in report.links:
        peer, bandwidth = link.peer_device, link.bandwidth_bytes_per_second
        if peer < 0 or (device_count is not None and peer >= device_count):
            found.append(f"links lead to device {peer}, which is not there ({_count(device_count)})")
        if bandwidth < 0:
            found.append(f"the link to device {peer} has {bandwidth} bytes per second")
    return found


def find_in_operators(report: CapabilityReport) -> list[str]:
    """Names, dtypes, constraints and reasons of the operators' entries."""
    found = [f"operator {each}" for each in _repeated(entry.name for entry in report.operators)]
    for entry in report.operators:
        spec = CATALOGUE.get(entry.name)
        if spec is None:
            found.append(f"operator {entry.name!r} is not in the catalogue")
            continue
        found += [f"{entry.name}: {each}" for each in _in_entry(entry, spec, report)]
    return found


def find_in_programs(report: CapabilityReport) -> list[str]:
    """Patterns, dtypes and constraints of step programs."""
    found = _in_names("step_programs", [entry.pattern for entry in report.step_programs], PATTERNS)
    for entry in report.step_programs:
        if entry.reason:
            continue
        where = f"step program {entry.pattern}"
        found += _in_names(f"{where}: dtypes", entry.dtypes, report.compute_dtypes)
        found += _in_names(f"{where}: kv_cache_dtypes", entry.kv_cache_dtypes, report.kv_cache_dtypes)
        found += _in_names(f"{where}: quantizations", entry.quantizations, ("", *PROGRAM_QUANTIZATIONS))
        if not entry.kv_layout:
            found.append(f"{where} names no kv_layout")
        found += [f"{where}: {each}" for text in entry.constraints for each in _in_program_constraint(text)]
    return found


def _in_program_constraint(text: str) -> list[str]:
    try:
        strangers = sorted(symbols_of(text) - SYMBOLS)
    except ValueError as error:
        return [str(error)]
    return [f"constraint {text!r} names {', '.join(strangers)}"] if strangers else []


def find_in_collectives(report: CapabilityReport) -> list[str]:
    """Primitives that the contract does not know, or that come twice."""
    found = _in_names("collectives", report.collectives, COLLECTIVES)
    if report.overlap_rows < 0:
        found.append(f"overlap_rows is {report.overlap_rows}")
    if report.overlap_rows > 0 and ASYNC_ALL_REDUCE not in report.collectives:
        found.append(f"overlap_rows is {report.overlap_rows}, and {ASYNC_ALL_REDUCE} is not declared")
    return found


def _in_dtypes(field: str, dtypes: Sequence[str], known: Iterable[str]) -> list[str]:
    return _in_names(field, dtypes, known) if dtypes else [f"{field} is empty"]


def _in_cache_conversion(report: CapabilityReport) -> Iterator[str]:
    """A cache of another dtype than any that is computed in needs native operators, which convert. A report
    without operators is that of a plugin whose own runner does.
    """
    missing = [name for name in _CACHE_OPERATORS if name not in native_operators(report)]
    if not report.operators or not missing:
        return
    for dtype in report.kv_cache_dtypes:
        if dtype not in report.compute_dtypes:
            yield (
                f"kv_cache_dtypes has {dtype!r}, which is no compute dtype, and no operator converts to it: "
                f"{', '.join(missing)} not native"
            )


def _in_entry(entry: OperatorCapability, spec: OpSpec, report: CapabilityReport) -> Iterator[str]:
    yield from _twice("dtypes", entry.dtypes)
    # An operator that ignores the compute dtype, such as argmax, has dtypes of its own.
    allowed = report.compute_dtypes if spec.follows_compute_dtype else spec.dtypes
    if strange := [dtype for dtype in entry.dtypes if dtype not in allowed]:
        yield f"covers dtypes that the chip lacks: {', '.join(map(str, strange))}"
    if entry.coverage is Coverage.REFERENCE and not entry.reason:
        yield "runs on the reference, and the report says not why"
    yield from _in_constraints(entry, spec, report.page_sizes_tokens)


def _in_constraints(entry: OperatorCapability, spec: OpSpec, pages: Sequence[int]) -> Iterator[str]:
    """Each can be read, names what is known at load, and allows the listed pages; together they leave at
    least one shape class, in one of these page sizes or its own.
    """
    classes = [one.sizes for one in spec.shape_classes]
    paged = {page: _with_page_size(classes, page) for page in dict.fromkeys(pages) if page > 0}
    tried = [*classes, *(sizes for several in paged.values() for sizes in several)]
    try:
        left = any(all(holds(each, sizes) for each in entry.constraints) for sizes in tried)
    except ValueError as error:
        yield str(error)
        return
    if not left:
        yield f"the constraints {', '.join(entry.constraints)} leave no shape class to check"
    for constraint in entry.constraints:
        names = _names(constraint)
        if steps := sorted(names - spec.fixed_symbols):
            yield (
                f"constraint {constraint!r} names {', '.join(steps)}, a size of a step, which is not known "
                "when operators are chosen; pad inside the kernel"
            )
        for page, several in paged.items():
            if _PAGE_SIZE in names and not any(holds(constraint, sizes) for sizes in several):
                yield f"constraint {constraint!r} excludes the page size {page} of page_sizes_tokens"


def _with_page_size(classes: Sequence[Mapping[str, int]], page: int) -> list[Mapping[str, int]]:
    return [{**sizes, _PAGE_SIZE: page} for sizes in classes if _PAGE_SIZE in sizes]


def _names(constraint: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(constraint, mode="eval")) if isinstance(node, ast.Name)}


def _in_names(field: str, names: Sequence[str], known: Iterable[str]) -> list[str]:
    known = frozenset(known)
    unknown = [
        f"{field} has {name!r}, which the contract does not know"
        for name in dict.fromkeys(names)
        if name not in known
    ]
    return unknown + _twice(field, names)


def _twice(field: str, values: Iterable[object]) -> list[str]:
    return [f"{field}: {each}" for each in _repeated(values)]


def _repeated(values: Iterable[object]) -> list[str]:
    times = Counter(values)
    return [f"{value!r} comes {count} times" for value, count in times.items() if count > 1]


def _count(device_count: int | None) -> str:
    return "links count from 0" if device_count is None else f"the plugin lists {device_count}"
