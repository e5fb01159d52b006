"""The gateway's way to the scheduler's AdminService: with certificates it needs an operator's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio

from gateway.config import GatewayConfig
from meshkit.certificates.reading import read_peer
from meshkit.errors import InvalidArgument
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role

if TYPE_CHECKING:  # grpc's one class for both kinds of channels is two in the stubs
    from chipmesh.scheduler.v1alpha1.admin_pb2_grpc import AdminServiceAsyncStub as AdminStub
else:
    from chipmesh.scheduler.v1alpha1.admin_pb2_grpc import AdminServiceStub as AdminStub

__all__ = ["NO_CERTIFICATE", "AdminStub", "open_admin"]

NO_CERTIFICATE = (
    "this gateway has a gateway's certificate, and the scheduler shows the mesh to operators only; set "
    "page.operator_tls to the files of an operator (`chipmesh certs create DIR --operator NAME`)"
)


async def open_admin(config: GatewayConfig) -> grpc.aio.Channel | None:
    """A channel on which AdminService may be called; None where the scheduler would refuse, see
    NO_CERTIFICATE. Close it yourself.

    Raises:
        InvalidArgument: page.operator_tls cannot be used, or is not an operator's.
    """
    tls = config.page.operator_tls
    if config.tls is not None and tls is None:
        return None
    if tls is not None:
        peer = await asyncio.to_thread(read_peer, tls.certificate)
        if peer.role is not Role.OPERATOR:
            raise InvalidArgument(
                f"page.operator_tls.certificate: {tls.certificate} is that of {peer}, and the page needs an "
                "operator's; `chipmesh certs create DIR --operator NAME` makes one",
                field="page.operator_tls.certificate",
            )
    # Untraced: a watch lives as long as somebody looks, and would be a span for each look.
    return open_channel(
        config.scheduler_address,
        max_message_bytes=config.max_message_bytes,
        traced=False,
        tls=tls,
        role=Role.SCHEDULER,
        name=tls.scheduler if tls else None,
    )
