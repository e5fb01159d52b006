"""Stand-in for the int8 operators of `kunlun_ops`: q stands for q * max / 127, max is its row's largest."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.kunlun_emulator.limits import FLOATS, XpuError, check_float, check_float32, check_shape, require

Quantised = tuple[Tensor, Tensor]


def quant2d(x: Tensor, y: Tensor, max: Tensor, force_sdnn: bool = False) -> None:  # noqa: A002 - its name
    """y int8 [m, k] of x [m, k], and max fp32 [m] or [m, 1].

    Read so, unverified on hardware: max is the largest magnitude of a row of x, y = x * 127 / max, to the
    nearest, ties to the even one; a row of zeros stays zeros.
    """
    name = "quant2d"
    require(force_sdnn, f"{name}: only force_sdnn=True is emulated")
    check_float(name, x=x)
    check_int8(name, y=y)
    check_float32(name, max=max)
    require(x.dim() == 2, f"{name}: x is {list(x.shape)}; it has two dimensions")
    check_shape(name, tuple(x.shape), y=y)
    require(
        max.shape in {(x.shape[0],), (x.shape[0], 1)},
        f"{name}: max is {list(max.shape)}, not one a row",
    )
    wide = x.float()
    largest = wide.abs().amax(1)
    max.copy_(largest.view(max.shape))
    divisor = largest.where(largest > 0, torch.ones(())).unsqueeze(1)
    y.copy_((wide * 127.0 / divisor).round().clamp(-127, 127))


def gemm_I8_I8_bf16_nt(lhs: Quantised, rhs: Quantised, out: Tensor) -> None:  # noqa: N802 - the vendor's name
    """out bf16 [m, n] = x [m, k] times w [n, k] transposed; each side is (int8 values, fp32 maxima by row).

    Read so, unverified on hardware: maxima are [m, 1] and [n, 1], as vLLM-Kunlun passes them, and the kernel
    divides by 127 twice, as a benchmark on a P800 reports.
    """
    name = "gemm_I8_I8_bf16_nt"
    (x, x_max), (w, w_max) = lhs, rhs
    _check_product(name, x, w, out)
    require(out.dtype == torch.bfloat16, f"{name}: out is {out.dtype}; it is bf16")
    check_float32(name, x_max=x_max, w_max=w_max)
    check_shape(name, (x.shape[0], 1), x_max=x_max)
    check_shape(name, (w.shape[0], 1), w_max=w_max)
    out.copy_(multiply_int8(x, w, x_max[:, 0], w_max[:, 0]))


def matmul(  # noqa: PLR0913, PLR0917 - the vendor's signature
    x: Tensor,
    w: Tensor,
    out: Tensor,
    x_trans: bool = False,
    w_trans: bool = True,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    x_max: Tensor | None = None,
    w_max: Tensor | None = None,
    x_pc_max: Tensor | None = None,
    w_pc_max: Tensor | None = None,
) -> None:
    """out [m, n] = x [m, k] times w [n, k] transposed, plus bias [n]; int8 with maxima by row, the pc_max.

    Read so, unverified on hardware: maxima are [m] and [n], bias has out's dtype, one rounding at the end.
    """
    name = "matmul"
    plain = not x_trans and w_trans and alpha == 1.0 and beta == 0.0 and x_max is None and w_max is None
    require(plain, f"{name}: other transpositions, alpha, beta, maxima of matrices are not emulated")
    if bias is not None:
        check_float(name, bias=bias, out=out)
        check_shape(name, (w.shape[0],), bias=bias)
    if x.dtype == torch.int8:
        _check_product(name, x, w, out)
        if x_pc_max is None or w_pc_max is None:
            raise XpuError(f"{name}: int8 wants x_pc_max and w_pc_max")
        check_float32(name, x_pc_max=x_pc_max, w_pc_max=w_pc_max)
        check_shape(name, (x.shape[0],), x_pc_max=x_pc_max)
        check_shape(name, (w.shape[0],), w_pc_max=w_pc_max)
        wide = multiply_int8(x, w, x_pc_max, w_pc_max)
    else:
        require(x_pc_max is None and w_pc_max is None, f"{name}: maxima by row belong to int8")
        check_float(name, x=x, w=w, out=out)
        _check_sizes(name, x, w, out)
        wide = torch.mm(x.float(), w.float().t())
    out.copy_(wide if bias is None else wide + bias.float())


def check_int8(operator: str, **tensors: Tensor) -> None:
    """All `tensors` are contiguous int8."""
    for name, tensor in tensors.items():
        require(tensor.dtype == torch.int8, f"{operator}: {name} is {tensor.dtype}; it takes int8")
        require(tensor.is_contiguous(), f"{operator}: {name} is not contiguous")


def multiply_int8(x: Tensor, w: Tensor, x_max: Tensor, w_max: Tensor) -> Tensor:
    """float32 [m, n] of int8 x [m, k] and w [n, k] with maxima [m] and [n]. Sums are exact, as int32 are:
    doubles hold them, and a host multiplies those faster.
    """
    total = torch.mm(x.double(), w.double().t()).float()
    return total * (x_max / 127.0)[:, None] * (w_max / 127.0)[None, :]


def _check_product(operator: str, x: Tensor, w: Tensor, out: Tensor) -> None:
    check_int8(operator, x=x, w=w)
    require(out.dtype in FLOATS and out.is_contiguous(), f"{operator}: out is contiguous fp32, fp16 or bf16")
    _check_sizes(operator, x, w, out)


def _check_sizes(operator: str, x: Tensor, w: Tensor, out: Tensor) -> None:
    require(
        x.dim() == 2 and w.dim() == 2 and x.shape[1] == w.shape[1],
        f"{operator}: x {list(x.shape)} is [rows, inner], w {list(w.shape)} [outputs, inner]",
    )
    check_shape(operator, (x.shape[0], w.shape[0]), out=out)
