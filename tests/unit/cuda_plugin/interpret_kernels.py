"""Runs the plugin's Triton kernels in Triton's interpreter and prints what each case found, as JSON: "" where
it agrees with the reference. A process of its own with TRITON_INTERPRET=1, read when Triton is imported.

The interpreter has no bfloat16 matrix product, so attention is tried in the other dtypes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from plugins.cuda import triton_kernels
from plugins.cuda.attention import TorchAttention
from plugins.cuda.norms import TorchNorms, TritonNorms
from plugins.cuda.triton_attention import TritonAttention
from plugins.sdk.trials import OperatorTrials, TrialSizes
from tests.unit.cuda_plugin.stand_in import operators_of, random

_SIZES = (TrialSizes(), TrialSizes(heads=4, groups=4, size=40, page=3, hidden=63))
_NORMS = TritonNorms(triton_kernels)
_ATTENTION = TritonAttention(triton_kernels, TorchAttention())


def norms_agree() -> str:
    """Both norms, in every dtype."""
    operators = operators_of(norms=_NORMS)
    dtypes = ("float32", "float16", "bfloat16")
    return _trials().find_problem(operators, "rms_norm", dtypes) or _trials().find_problem(
        operators, "add_rms_norm", dtypes
    )


def decode_agrees() -> str:
    """In one part and in several."""
    return _trials().find_problem(operators_of(_ATTENTION), "attention_decode", ("float32", "float16"))


def norms_take_rows_with_gaps() -> str:
    """As parts of one product come, and as norms of single heads are called."""
    plain, wide, weight = TorchNorms(), random(1, 5, 7, 64), random(2, 32)
    for x in (wide[:, 2:4, :32], wide[:, 3, ::2], wide[1, :, 32:]):
        got = (_NORMS.rms_norm(x, weight, 1e-5), *_NORMS.add_rms_norm(x, x + 1, weight, 1e-5))
        wanted = (plain.rms_norm(x, weight, 1e-5), *plain.add_rms_norm(x, x + 1, weight, 1e-5))
        if not all(map(_close, got, wanted)):
            return f"differs for strides {x.stride()}"
    return ""


def decode_stays_below_lengths() -> str:
    """A short row's table ends in page 0, which belongs to somebody whose values are not finite."""
    cache, query = random(1, 2, 4, 4, 2, 16), random(2, 2, 6, 16)
    table, lengths = torch.tensor([[1, 0, 0], [2, 3, 1]]), torch.tensor([3, 12])
    clean = _ATTENTION.decode(query, cache, table, lengths, 0.2)
    cache[:, 0] = float("nan")
    same = torch.equal(_ATTENTION.decode(query, cache, table, lengths, 0.2), clean)
    right = _close(clean, TorchAttention().decode(query, cache, table, lengths, 0.2))
    return "" if same and right else f"poison told: {not same}, right before: {right}"


CASES: dict[str, Callable[[], str]] = {
    case.__name__: case
    for case in (norms_agree, decode_agrees, norms_take_rows_with_gaps, decode_stays_below_lengths)
}


def _trials() -> OperatorTrials:
    memory = operators_of()._memory
    return OperatorTrials(memory=memory, place=torch.clone, synchronize=lambda: None, sizes=_SIZES)


def _close(got: Tensor, wanted: Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.allclose(got, wanted, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: case() for name, case in CASES.items()}))
