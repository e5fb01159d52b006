"""Compiles the plugin's Triton kernels for one architecture: `python compile_kernels.py 90`. A process of its
own, since Triton decides when it is imported whether kernels are interpreted.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from plugins.cuda import triton_kernels

_SIZES = {
    "group": 8, "size": 128, "page": 16, "part_tokens": 512, "block_heads": 16, "block_size": 128,
    "block_tokens": 32, "block": 4096,
}  # fmt: skip
_TYPES = {
    "page_table": "*i64", "lengths": "*i64", "partial": "*fp32", "weight_logs": "*fp32", "eps": "fp32",
    "scale": "fp32",
}  # fmt: skip
_COMPUTE = ("query", "keys", "values", "x", "residual", "weight", "output", "total")
_DTYPES = ("*bf16", "*fp16", "*fp32")


def main(capability: int) -> int:
    """The number of kernels that were compiled; an error ends it."""
    compiler, targets = map(importlib.import_module, ("triton.compiler", "triton.backends.compiler"))
    target = targets.GPUTarget("cuda", capability, 32)
    done = 0
    kernels = (triton_kernels.rms_norm_row, triton_kernels.add_rms_norm_row, triton_kernels.decode_part)
    for kernel in kernels:
        for dtype in _DTYPES:
            compiled = compiler.compile(_source(compiler, kernel, dtype), target=target)
            done += bool(compiled.asm["cubin"])
    return done


def _source(compiler: Any, kernel: Any, dtype: str) -> Any:
    types = {**_TYPES, **dict.fromkeys(_COMPUTE, dtype)}
    names = kernel.arg_names
    return compiler.ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in _SIZES else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): _SIZES[name] for name in names if name in _SIZES},
    )


if __name__ == "__main__":
    sys.stdout.write(str(main(int(sys.argv[1]))))
