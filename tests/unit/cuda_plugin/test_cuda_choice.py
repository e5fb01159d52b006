"""What is chosen at start: libraries that agree with the reference; what differs is left aside or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition
from plugins.cuda import attention, probes
from plugins.cuda.attention import TorchAttention
from plugins.cuda.flashinfer_attention import FlashInferAttention, page_lists
from plugins.cuda.memory import CudaMemory
from plugins.cuda.operators import CudaOperators
from plugins.cuda.probes import start_operators
from plugins.cuda.runtime import Runtime
from plugins.sdk.declined import was_declined_at_start
from plugins.sdk.reference import operators as reference
from tests.unit.cuda_plugin.stand_in import random, runtime_of
from tests.unit.cuda_plugin.stand_in_flashinfer import BatchDecodeWithPagedKVCacheWrapper, Library

DTYPES = ("bfloat16",)


def start(runtime: Runtime) -> CudaOperators:
    return start_operators(CudaMemory(runtime), runtime, DTYPES)


class WrongScale(BatchDecodeWithPagedKVCacheWrapper):
    """A build that ignores the scale it is given."""

    def plan(self, *arguments: Any, sm_scale: float, **rest: Any) -> None:
        super().plan(*arguments, sm_scale=2 * sm_scale, **rest)


def test_flashinfer_is_chosen_where_it_agrees() -> None:
    runtime = runtime_of(libraries={"flashinfer": Library()})
    operators = start(runtime)
    assert runtime.choices == {"attention_kernels": "flashinfer", "norm_kernels": "torch"}
    assert operators.declined == {}


def test_a_library_that_differs_is_left_aside_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    runtime = runtime_of(libraries={"flashinfer": Library(decode=WrongScale)})
    with caplog.at_level(logging.WARNING):
        operators = start(runtime)
    assert runtime.choices["attention_kernels"] == "torch"
    assert operators.declined == {}, "torch's own attention is as native"
    assert "attention_decode was compared with the reference at load in bfloat16: off by" in caplog.text


def test_a_library_that_lacks_what_is_called_is_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    runtime = runtime_of(libraries={"flashinfer": object()})
    start(runtime)
    assert runtime.choices["attention_kernels"] == "torch"
    assert "AttributeError" in caplog.text


def test_a_library_that_the_options_require_is_refused_where_it_differs() -> None:
    runtime = runtime_of(libraries={"flashinfer": Library(decode=WrongScale)}, required=("flashinfer",))
    with pytest.raises(FailedPrecondition, match="names flashinfer, whose attention_decode") as error:
        start(runtime)
    assert error.value.field == "backend_options.kernel_libraries"
    assert error.value.reason == "LIBRARY_DIFFERS"


def test_what_torch_itself_gets_wrong_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(self: CudaOperators, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        reference.write_kv(key, value, kv_cache, cells + 1)

    monkeypatch.setattr(CudaOperators, "write_kv", shifted)
    operators = start(runtime_of())
    assert set(operators.declined) == {"write_kv"}
    assert was_declined_at_start(operators.declined["write_kv"])
    assert "off by" in operators.declined["write_kv"]


def test_experts_fall_with_the_product_that_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_kernel(*tensors: Tensor) -> Tensor:
        raise RuntimeError("_int_mm_out_cuda not compiled for this platform")

    monkeypatch.setattr(torch, "_int_mm", no_such_kernel)
    operators = start(runtime_of())
    assert set(operators.declined) == {"linear_w8a8", "moe_experts_w8a8"}
    assert "not compiled" in operators.declined["linear_w8a8"]
    assert "its part linear_w8a8" in operators.declined["moe_experts_w8a8"]


def test_attention_that_reads_past_a_length_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = attention._gather

    def longer(
        self: TorchAttention,
        query: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        scale: float,
    ) -> Tensor:
        whole = torch.full_like(lengths, gather(kv_cache, page_table).shape[2])
        return decode(self, query, kv_cache, page_table, whole, scale)

    decode = TorchAttention.decode
    monkeypatch.setattr(TorchAttention, "decode", longer)
    assert set(start(runtime_of()).declined) == {"attention_decode"}


def test_the_trials_use_sizes_for_which_libraries_have_kernels_of_their_own() -> None:
    assert {each.size for each in probes._SIZES} == {64, 128}
    assert {each.heads // each.groups for each in probes._SIZES} == {3, 8}


def test_page_lists_are_as_flashinfer_documents_them() -> None:
    indptr, last, used = page_lists(torch.tensor([1, 16, 17, 40]), 16, 3)
    assert indptr.tolist() == [0, 1, 2, 4, 7]
    assert last.tolist() == [1, 16, 1, 8]
    assert used.sum(dim=1).tolist() == [1, 1, 2, 3]
    assert {indptr.dtype, last.dtype} == {torch.int32}


def test_a_step_is_planned_once_for_all_its_layers() -> None:
    library = Library()
    attend = FlashInferAttention(library, TorchAttention())
    layers = [random(layer, 2, 6, 16, 2, 64, dtype=torch.bfloat16) for layer in range(3)]
    query = random(9, 2, 6, 64, dtype=torch.bfloat16)
    for _ in range(2):
        table, lengths, pages = torch.tensor([[2, 0], [1, 4]]), torch.tensor([3, 30]), torch.tensor([5, 1, 3])
        for cache in layers:
            got = attend.decode(query, cache, table, lengths, 0.1)
            wanted = TorchAttention().decode(query, cache, table, lengths, 0.1)
            torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
            got = attend.prefill(query, cache, pages, 31, 0.1)
            wanted = TorchAttention().prefill(query, cache, pages, 31, 0.1)
            torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    assert (library.decode.plans, library.prefill.plans) == (2, 2)
    again = torch.tensor([5, 1, 3])
    for first in (30, 31):
        attend.prefill(query, layers[0], again, first, 0.1)
    assert library.prefill.plans == 4, "another start is another plan"


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "size"),
    [
        (torch.float32, torch.float32, 64),
        (torch.bfloat16, torch.float16, 64),
        (torch.bfloat16, torch.bfloat16, 80),
    ],
)
def test_what_flashinfer_has_no_kernel_for_goes_to_torch(
    dtype: torch.dtype, kv_dtype: torch.dtype, size: int
) -> None:
    library = Library()
    attend = FlashInferAttention(library, TorchAttention())
    cache, query = random(1, 2, 4, 16, 2, size, dtype=kv_dtype), random(2, 2, 6, size, dtype=dtype)
    table, lengths = torch.tensor([[2], [1]]), torch.tensor([3, 16])
    wanted = TorchAttention().decode(query, cache, table, lengths, 0.1)
    assert torch.equal(attend.decode(query, cache, table, lengths, 0.1), wanted)
    attend.prefill(query, cache, torch.tensor([2]), 3, 0.1)
    assert library.decode.plans == library.prefill.plans == 0
