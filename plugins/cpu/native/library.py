"""The step kernel's C interface as Python sees it. Calls release the GIL; nothing here decides anything."""

from __future__ import annotations

import ctypes
from pathlib import Path

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_SMALL = ctypes.c_int32

ENCODINGS = ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1")
"""By number, as in kernels.h; all decode to float32 exactly as GGUF defines them."""
BLOCKS = ("Q8_0", "Q4_0", "Q4_1")
"""Those whose products take rows in int8 where that is asked for."""
MATRICES = ("qkv", "out", "gate_up", "down", "head")
VECTORS = ("input_norm", "post_norm", "final_norm", "cos_sin")

PHASES = (
    "embed", "norm", "round", "qkv", "rotate", "attention", "out", "gate_up", "down", "gather", "head",
    "sample",
)  # fmt: skip
"""Of a step, as in step.h."""
RUN_FIELDS = 3
"""Numbers of a PhaseRun of step.h: phase, begin and end in nanoseconds of the monotonic clock."""


class Sizes(ctypes.Structure):
    """Field for field as in model.h."""

    _fields_ = (
        ("layers", _INT),
        ("hidden", _INT),
        ("inner", _INT),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("head_size", _INT),
        ("vocab", _INT),
        ("context", _INT),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


SETTINGS = {
    "temperature": "<f4",
    "top_k": "<i8",
    "top_p": "<f4",
    "min_p": "<f4",
    "seed": "<u8",
    "choice": "<u8",
    "output_index": "<i8",
}
"""Of all slots, an array of its dtype each, field for field as in sampling.h."""


class StepArguments(ctypes.Structure):
    """Field for field as in step.h."""

    _fields_ = (
        ("tokens", _INT),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("sequences", _POINTER),
        ("tables", _POINTER),
        ("table_width", _INT),
        ("cache", _POINTER),
        ("page_count", _INT),
        ("page_size", _INT),
        ("sampled", _INT),
        ("sampled_rows", _POINTER),
        ("logits", _POINTER),
        ("sampled_slots", _POINTER),
        *((name, _POINTER) for name in SETTINGS),
        ("chosen", _POINTER),
        ("allowed_rows", _POINTER),
        ("allowed", _POINTER),
    )


_FUNCTIONS = {
    "find_kernels": (_POINTER, (ctypes.c_char_p,)),
    "kernels_name": (ctypes.c_char_p, (_POINTER,)),
    "create": (_POINTER, (_POINTER, _SMALL, _POINTER, _SMALL)),
    "destroy": (None, (_POINTER,)),
    "set_vector": (ctypes.c_int, (_POINTER, _SMALL, _INT, _POINTER, _INT)),
    "set_matrix": (ctypes.c_int, (_POINTER, _SMALL, _INT, _SMALL, _POINTER, _INT, _INT, _POINTER)),
    "set_embedding": (ctypes.c_int, (_POINTER, _SMALL, _POINTER, _INT)),
    "decode": (None, (_POINTER, _SMALL, _POINTER, _INT, _INT, _POINTER)),
    "run": (ctypes.c_int, (_POINTER, _POINTER)),
    "start_timing": (ctypes.c_int, (_POINTER, _INT)),
    "stop_timing": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "fma": (ctypes.c_double, (_POINTER, _INT, _POINTER)),
    "int8": (ctypes.c_double, (_POINTER, _INT, _POINTER)),
    "read": (ctypes.c_float, (_POINTER, _POINTER, _INT)),
    "multiply": (ctypes.c_int, (_POINTER, _SMALL, _INT, _POINTER, _INT, _POINTER)),
}


class StepLibrary:
    """An open library; its functions are attributes named as in api.cpp, less the prefix."""

    def __init__(self, file: Path) -> None:
        """Raises OSError where the file is no library that this host loads."""
        self.file = file
        library = ctypes.CDLL(str(file))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"chipmesh_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.kernels = self.find_kernels(b"")
        self.instruction_set: str = self.kernels_name(self.kernels).decode()

    find_kernels: ctypes._NamedFuncPointer
    kernels_name: ctypes._NamedFuncPointer
    create: ctypes._NamedFuncPointer
    destroy: ctypes._NamedFuncPointer
    set_vector: ctypes._NamedFuncPointer
    set_matrix: ctypes._NamedFuncPointer
    set_embedding: ctypes._NamedFuncPointer
    decode: ctypes._NamedFuncPointer
    run: ctypes._NamedFuncPointer
    start_timing: ctypes._NamedFuncPointer
    stop_timing: ctypes._NamedFuncPointer
    fma: ctypes._NamedFuncPointer
    int8: ctypes._NamedFuncPointer
    read: ctypes._NamedFuncPointer
    multiply: ctypes._NamedFuncPointer

    def __repr__(self) -> str:
        return f"<StepLibrary {self.instruction_set} {self.file}>"
