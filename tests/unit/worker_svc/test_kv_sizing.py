"""The KV cache's size: each rule, and the numbers in each refusal."""

from __future__ import annotations

import pytest

from meshkit.errors import MeshError, ResourceExhausted
from worker_svc.kv_sizing import DeviceMemory, KvRequest, KvSize, size_kv_cache

GIB = 1 << 30
HOST = DeviceMemory(total_bytes=24 * GIB, free_bytes=20 * GIB, shared_with_host=True)
CARD = DeviceMemory(total_bytes=80 * GIB, free_bytes=78 * GIB, shared_with_host=False)


def size(request: KvRequest, memory: DeviceMemory, *, token: int = 1 << 16, weights: int = GIB) -> KvSize:
    return size_kv_cache(request, memory, page_size=16, kv_bytes_per_token=token, weight_bytes=weights)


def test_max_total_tokens_is_rounded_down_to_pages() -> None:
    assert size(KvRequest(max_total_tokens=1007), HOST).page_count == 62


def test_a_fraction_counts_the_weights_in() -> None:
    got = size(KvRequest(mem_fraction_static=0.5), CARD)
    assert got.page_count == (40 * GIB - GIB) // (16 << 16)


def test_executors_share_a_hosts_memory_but_not_a_cards() -> None:
    two = KvRequest(mem_fraction_static=0.5, executors_on_host=2)
    assert size(two, HOST).page_count == (6 * GIB - GIB) // (16 << 16)
    assert size(two, CARD).page_count == (40 * GIB - GIB) // (16 << 16)


def test_a_default_start_leaves_most_of_a_host_alone() -> None:
    got = size(KvRequest(), HOST)
    assert got.page_count * 16 << 16 <= 2 * GIB
    assert (
        size(KvRequest(), DeviceMemory(4 * GIB, GIB // 2, True), weights=0).page_count * 16 << 16 < GIB // 2
    )


def test_a_default_start_takes_most_of_a_card() -> None:
    assert size(KvRequest(), CARD).page_count == (int(80 * GIB * 0.85) - GIB) // (16 << 16)


def test_tiny_cells_do_not_make_millions_of_pages_by_default() -> None:
    assert size(KvRequest(), HOST, token=36).page_count == (1 << 20) // 16
    assert size(KvRequest(mem_fraction_static=0.25), HOST, token=36).page_count > 1 << 20


@pytest.mark.parametrize(
    ("request_", "memory", "weights", "numbers"),
    [
        (KvRequest(max_total_tokens=16), HOST, 0, ["1 pages", "16 tokens", "1048576 bytes"]),
        (KvRequest(max_total_tokens=10**9), HOST, 0, [str(20 * GIB), str(24 * GIB)]),
        (KvRequest(mem_fraction_static=0.1), HOST, 3 * GIB, ["0 pages", "24.00 GiB", "3.00 GiB"]),
        (KvRequest(), HOST, 8 * GIB, ["0.25", "8.00 GiB"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(
    request_: KvRequest, memory: DeviceMemory, weights: int, numbers: list[str]
) -> None:
    with pytest.raises(ResourceExhausted) as refused:
        size(request_, memory, weights=weights)
    for number in numbers:
        assert number in refused.value.message


def test_a_model_without_cells_is_refused() -> None:
    with pytest.raises(MeshError):
        size(KvRequest(), HOST, token=0)
