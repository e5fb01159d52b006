"""Calls of an executor's RPCs, one after the other, with the contract's errors. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio

from chipmesh.device.v1alpha1.tensor_pb2 import TensorSpec, TensorValue
from meshkit.errors import from_rpc_error
from meshkit.rpc.keepalive import DEFAULT_MAX_MESSAGE_BYTES, client_options
from plugins.sdk.tensors import HostTensor

MAX_MESSAGE_BYTES = DEFAULT_MAX_MESSAGE_BYTES
_GRACE_S = 5.0
"""A call may take this much longer than its check: the check's own limit says more."""
_PATIENCE_S = 600.0


class Calls:
    """A connection to one executor; close it yourself.

    limit_s: of the check that makes a call; None: ten minutes for each call.
    """

    def __init__(self, address: str, *, limit_s: float | None) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=client_options(MAX_MESSAGE_BYTES))
        self._timeout_s = _PATIENCE_S if limit_s is None else limit_s + _GRACE_S

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        """The response of a stub's method.

        Raises:
            MeshError: as the executor raised it; Unavailable where nobody answers.
        """
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            # A synchronous error has what from_rpc_error reads of an asynchronous one.
            raise from_rpc_error(cast("grpc.aio.AioRpcError", error)) from error

    def close(self) -> None:
        """End the connection."""
        self.channel.close()


def read_value(value: TensorValue) -> HostTensor:
    """A tensor that an executor sent. Raises InvalidArgument where form and bytes do not agree."""
    return HostTensor(value.spec.dtype, tuple(value.spec.shape), value.data)


def write_value(value: HostTensor) -> TensorValue:
    """A tensor for an executor."""
    return TensorValue(spec=TensorSpec(dtype=value.dtype, shape=value.shape), data=value.data)
