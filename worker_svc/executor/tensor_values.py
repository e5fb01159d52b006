"""Tensors by value between the wire and the SDK: for conformance and tools. Serving sends no bulk data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chipmesh.device.v1alpha1.tensor_pb2 import TensorSpec, TensorValue
from meshkit.errors import InvalidArgument
from plugins.sdk.tensors import HostTensor, tensor_bytes

MAX_VALUES_BYTES = 48 << 20
"""All values of one message together. A message has at most 64 MiB (meshkit.rpc): the rest is for names and
forms, and for clients whose own limit counts a little differently.
"""


def read_value(value: TensorValue, *, field: str) -> HostTensor:
    """The SDK's form of a value.

    Raises:
        InvalidArgument: larger than 48 MiB, of an unknown dtype, or its data and shape do not agree; the
            field is named.
    """
    shape, dtype = read_spec(value.spec, field=f"{field}.spec")
    check_size(len(value.data), field=field)
    wanted = tensor_bytes(shape, dtype)
    if len(value.data) != wanted:
        raise InvalidArgument(
            f"{field}.data has {len(value.data)} bytes; {dtype} of shape {list(shape)} has {wanted}",
            field=f"{field}.data",
        )
    return HostTensor(dtype=dtype, shape=shape, data=value.data)


def read_spec(spec: TensorSpec, *, field: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a spec.

    Raises:
        InvalidArgument: the dtype is unknown; the field is named.
    """
    shape = tuple(spec.shape)
    try:
        tensor_bytes(shape, spec.dtype)
    except InvalidArgument as error:
        raise InvalidArgument(f"{field}: {error.message}", field=f"{field}.{error.field}") from error
    return shape, spec.dtype


def write_value(value: HostTensor, *, field: str) -> TensorValue:
    """The wire form of a value that travels alone.

    Raises:
        InvalidArgument: larger than 48 MiB.
    """
    return write_values([value], field=field)[0]


def write_values(values: Sequence[HostTensor], *, field: str) -> list[TensorValue]:
    """The wire form of values that travel together.

    Raises:
        InvalidArgument: together larger than 48 MiB.
    """
    check_size(sum(len(value.data) for value in values), field=field)
    return [
        TensorValue(spec=TensorSpec(dtype=value.dtype, shape=value.shape), data=value.data)
        for value in values
    ]


def check_sizes(values: Iterable[TensorValue], *, field: str) -> None:
    """Raises InvalidArgument where values came together that are larger than 48 MiB."""
    check_size(sum(len(value.data) for value in values), field=field)


def check_size(nbytes: int, *, field: str) -> None:
    """Raises InvalidArgument where values of `nbytes` in all may not travel in one message."""
    if nbytes > MAX_VALUES_BYTES:
        raise InvalidArgument(
            f"{field} has {nbytes} bytes; the tensors of one message have at most {MAX_VALUES_BYTES} in all. "
            "Use smaller ones",
            field=field,
            reason="VALUE_TOO_LARGE",
            limit_bytes=MAX_VALUES_BYTES,
        )
