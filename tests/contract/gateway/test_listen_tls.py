"""The public listener with a certificate, which may change while streams run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from meshkit.errors import InvalidArgument
from tests.contract.gateway.gateway_client import Mesh, MeshFactory, Stream, request_of
from tests.support.self_signed import write_self_signed
from tests.unit.gateway.tiny_model import tokens_of


def channel_of(mesh: Mesh, authority: bytes) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(mesh.address, grpc.ssl_channel_credentials(authority))


def files_in(folder: Path) -> dict[str, Any]:
    return {"listen_tls": {"certificate": str(folder / "certificate.pem"), "key": str(folder / "key.pem")}}


async def list_models(channel: grpc.aio.Channel) -> grpc.StatusCode:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    code: grpc.StatusCode = await stub.ListModels(pb.ListModelsRequest(), timeout=10).code()
    return code


async def test_a_client_needs_no_certificate_and_a_changed_one_counts_for_new_connections(
    run_mesh: MeshFactory, tmp_path: Path
) -> None:
    first = await asyncio.to_thread(write_self_signed, tmp_path)
    async with run_mesh(**files_in(tmp_path)) as mesh:
        session = await mesh.session()
        assert await list_models(mesh.channel) is grpc.StatusCode.UNAVAILABLE, "plain text was served"
        async with channel_of(mesh, first) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            stream = Stream(stub.Generate(request_of("hi"), timeout=20))
            request = await session.accepts()
            await stream.start()
            second = await asyncio.to_thread(write_self_signed, tmp_path)
            for authority, code in ((second, grpc.StatusCode.OK), (first, grpc.StatusCode.UNAVAILABLE)):
                # Its own connection: the stream's one is there already, with the first certificate.
                options = [("grpc.use_local_subchannel_pool", 1)]
                credentials = grpc.ssl_channel_credentials(authority)
                async with grpc.aio.secure_channel(mesh.address, credentials, options=options) as another:
                    assert await list_models(another) is code
            request.tokens(0, tokens_of("abc"))
            request.finished()
            await stream.end()
            assert stream.text == "abc"


async def test_files_that_cannot_be_used_are_named_at_the_start(
    run_mesh: MeshFactory, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        async with run_mesh(**files_in(tmp_path)):
            raise AssertionError("it started")
    assert (caught.value.field or "").startswith("listen_tls")
    assert str(tmp_path) in caught.value.message
