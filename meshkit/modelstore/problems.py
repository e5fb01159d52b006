"""The one shape of every complaint about a model reference."""

from __future__ import annotations

from meshkit.errors import InvalidArgument


def model_path_error(message: str, *, reason: str) -> InvalidArgument:
    """An `InvalidArgument` that blames `model_path`; `reason` is what programs compare."""
    return InvalidArgument(f"model_path: {message}", field="model_path", reason=reason)
