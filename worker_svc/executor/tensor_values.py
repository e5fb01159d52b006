"""Small tensors between the wire and the SDK. The control plane carries no bulk data."""

from __future__ import annotations

from chipmesh.device.v1alpha1.tensor_pb2 import TensorSpec, TensorValue
from meshkit.errors import InvalidArgument
from plugins.sdk.tensors import HostTensor, tensor_bytes

MAX_VALUE_BYTES = 1 << 20


def read_value(value: TensorValue, *, field: str) -> HostTensor:
    """The SDK's form of a value.

    Raises:
        InvalidArgument: larger than 1 MiB, unknown dtype, or data and shape do not agree; the field is named.
    """
    shape, dtype = read_spec(value.spec, field=f"{field}.spec")
    if len(value.data) > MAX_VALUE_BYTES:
        raise _too_large(len(value.data), field)
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
    """The wire form of a value.

    Raises:
        InvalidArgument: larger than 1 MiB.
    """
    check_size(len(value.data), field=field)
    return TensorValue(spec=TensorSpec(dtype=value.dtype, shape=value.shape), data=value.data)


def check_size(nbytes: int, *, field: str) -> None:
    """Raises InvalidArgument where a value of `nbytes` may not travel."""
    if nbytes > MAX_VALUE_BYTES:
        raise _too_large(nbytes, field)


def _too_large(nbytes: int, field: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field} has {nbytes} bytes; a tensor by value has at most {MAX_VALUE_BYTES}. Use a smaller one",
        field=field,
        reason="VALUE_TOO_LARGE",
    )
