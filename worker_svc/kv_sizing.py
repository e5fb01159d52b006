"""How many pages the KV cache gets: a pure function of what was configured and what the device reports."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.errors import FailedPrecondition, ResourceExhausted

DEVICE_FRACTION = 0.85
"""Default share of a device's memory for weights and KV; the rest is for activations and the runtime."""
HOST_FRACTION = 0.25
"""The same where the device's memory is the host's: other processes live there."""
HOST_KV_CAP_BYTES = 2 << 30
"""Most KV bytes that a default start takes of a host."""
HOST_MAX_TOKENS = 1 << 20
"""Most tokens of a default start on a host: with tiny cells more would only swell the scheduler's tables."""
MIN_PAGES = 2
_GIB = float(1 << 30)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that the device reports, in bytes. shared_with_host: it is the host's own memory."""

    total_bytes: int
    free_bytes: int
    shared_with_host: bool


@dataclass(frozen=True)
class KvRequest:
    """What was configured; None: not. max_total_tokens: KV size in tokens. mem_fraction_static: (0, 1]."""

    page_size: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    executors_on_host: int = 1


@dataclass(frozen=True)
class KvSize:
    """The cache to allocate."""

    page_count: int
    page_size: int
    rule: str
    """How it came about, for the log."""


def size_kv_cache(
    request: KvRequest, memory: DeviceMemory, *, page_size: int, kv_bytes_per_token: int, weight_bytes: int
) -> KvSize:
    """Pages of the KV cache, by the first rule that applies:

    1. `max_total_tokens`: that many tokens, rounded down to pages; it must fit into what the device has free.
    2. `mem_fraction_static`: (device memory / executors on the host) x fraction, less the weights.
       Executors share memory only where it is the host's (a control group's limit there).
    3. Neither: as 2 with fraction 0.85 on a device of its own; with 0.25 where the memory is the host's,
       and then at most 2 GiB of KV and 2**20 tokens. Never more than 90 % of what is free.

    Raises:
        ResourceExhausted: fewer than 2 pages, or more than is free; the numbers are named.
    """
    bytes_per_page = page_size * kv_bytes_per_token
    if bytes_per_page <= 0:
        raise FailedPrecondition(f"a page of {page_size} tokens of {kv_bytes_per_token} bytes holds nothing")
    if request.max_total_tokens is not None:
        pages = request.max_total_tokens // page_size
        rule = f"max_total_tokens {request.max_total_tokens}"
        _check_free(pages * bytes_per_page, memory, rule)
    else:
        budget, rule = _kv_budget(request, memory, weight_bytes)
        pages = max(budget, 0) // bytes_per_page
        if request.mem_fraction_static is None and memory.shared_with_host:
            pages = min(pages, HOST_MAX_TOKENS // page_size)
    if pages < MIN_PAGES:
        raise ResourceExhausted(
            f"the KV cache would have {pages} pages of {page_size} tokens ({bytes_per_page} bytes "
            f"a page) by {rule}; it needs {MIN_PAGES}. Give more by max_total_tokens or "
            "mem_fraction_static, or a smaller page_size",
            field="max_total_tokens" if request.max_total_tokens is not None else "mem_fraction_static",
            reason="KV_CACHE_TOO_SMALL",
        )
    return KvSize(page_count=pages, page_size=page_size, rule=rule)


def memory_share(request: KvRequest, memory: DeviceMemory) -> int:
    """Bytes of the device's memory that are one executor's."""
    return memory.total_bytes // (request.executors_on_host if memory.shared_with_host else 1)


def static_fraction(request: KvRequest, memory: DeviceMemory) -> float:
    """Of that, what weights and KV cache may take."""
    if request.mem_fraction_static is not None:
        return request.mem_fraction_static
    return HOST_FRACTION if memory.shared_with_host else DEVICE_FRACTION


def _check_free(wanted: int, memory: DeviceMemory, rule: str) -> None:
    if wanted > memory.free_bytes:
        raise ResourceExhausted(
            f"{rule} takes {wanted} bytes of KV cache; the device has {memory.free_bytes} of "
            f"{memory.total_bytes} bytes free",
            field="max_total_tokens",
            reason="KV_CACHE_TOO_LARGE",
        )


def _kv_budget(request: KvRequest, memory: DeviceMemory, weight_bytes: int) -> tuple[int, str]:
    """Bytes for KV by rule 2 or 3, and the rule in words."""
    fraction, share = static_fraction(request, memory), memory_share(request, memory)
    budget = int(share * fraction) - weight_bytes
    rule = f"{fraction:g} of {share / _GIB:.2f} GiB less {weight_bytes / _GIB:.2f} GiB of weights"
    if request.mem_fraction_static is None:
        if memory.shared_with_host:
            budget = min(budget, HOST_KV_CAP_BYTES)
            rule += f", at most {HOST_KV_CAP_BYTES / _GIB:g} GiB on a host"
        budget = min(budget, int(memory.free_bytes * 0.9))
        rule += f", at most 90 % of the {memory.free_bytes / _GIB:.2f} GiB free"
    return budget, rule
