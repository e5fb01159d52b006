"""What a router asks when it registers the mesh: health, model, server, tokenizer; what is not offered."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from tokenizers import Tokenizer

from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from chipmesh.sglang_grpc import smg_common_pb2 as common
from meshkit.errors import FailedPrecondition, InvalidArgument, Unimplemented
from tests.contract.gateway_sglang.router_client import MeshFactory, RouterMesh
from tests.unit.gateway.tiny_model import CONTEXT_TOKENS, IM_END, VOCAB_SIZE, tokens_of


async def read_archive(mesh: RouterMesh) -> bytes:
    call = mesh.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=10, metadata=mesh.metadata)
    chunks = [chunk async for chunk in call]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    return data


async def test_health_follows_the_scheduler_not_the_workers(run_mesh: MeshFactory) -> None:
    async with run_mesh() as mesh:
        await mesh.session()
        assert (await mesh.call("HealthCheck", sgl.HealthCheckRequest())).healthy
        await mesh.scheduler.stop()
        while (answer := await mesh.call("HealthCheck", sgl.HealthCheckRequest())).healthy:
            pass
        assert answer.message == "no scheduler is connected"


async def test_the_model_is_described(mesh: RouterMesh) -> None:
    info = await mesh.call("GetModelInfo", sgl.GetModelInfoRequest())
    assert (info.served_model_name, info.model_path, info.tokenizer_path) == ("tiny", "tiny", "")
    assert (info.max_context_length, info.max_req_input_len) == (CONTEXT_TOKENS, CONTEXT_TOKENS - 1)
    assert (info.vocab_size, list(info.eos_token_ids)) == (VOCAB_SIZE, [IM_END])
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert info.is_generation
    assert not info.supports_vision


async def test_the_server_is_one_engine_of_one_rank(mesh: RouterMesh) -> None:
    info = await mesh.call("GetServerInfo", sgl.GetServerInfoRequest())
    assert info.server_type == "grpc"
    assert info.sglang_version.startswith("chipmesh ")
    arguments = MessageToDict(info.server_args)
    assert (arguments["served_model_name"], arguments["dp_size"], arguments["tp_size"]) == ("tiny", 1, 1)
    assert info.uptime_seconds >= 0
    assert info.start_time.seconds > 0


async def test_a_router_makes_the_same_tokenizer_of_the_archive(mesh: RouterMesh) -> None:
    data = await read_archive(mesh)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
        settings = json.loads(archive.read("tokenizer_config.json"))
        assert json.loads(archive.read("config.json"))["vocab_size"] == VOCAB_SIZE
    assert tokenizer.encode("hé", add_special_tokens=False).ids == tokens_of("hé")
    assert "<|im_start|>" in settings["chat_template"]
    assert await read_archive(mesh) == data


async def test_a_model_without_a_tokenizer_says_so(run_mesh: MeshFactory, token_model: Path) -> None:
    async with run_mesh(model=token_model) as mesh:
        with pytest.raises(grpc.aio.AioRpcError, match="has no tokenizer") as caught:
            await read_archive(mesh)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await mesh.call("GetModelInfo", sgl.GetModelInfoRequest())).model_type == ""


async def test_of_several_models_the_configuration_chooses(
    run_mesh: MeshFactory, tiny_model: Path, token_model: Path
) -> None:
    models = [{"name": "tiny", "path": str(tiny_model)}, {"name": "tokens", "path": str(token_model)}]
    async with run_mesh(models=models) as mesh:
        with pytest.raises(FailedPrecondition, match=r"sglang_grpc\.model") as caught:
            await mesh.call("GetModelInfo", sgl.GetModelInfoRequest())
        assert caught.value.reason == "MODEL_NOT_CHOSEN"
    async with run_mesh(models=models, sglang_grpc={"model": "tokens"}) as mesh:
        info = await mesh.call("GetModelInfo", sgl.GetModelInfoRequest())
        assert info.served_model_name == "tokens"
        session = await mesh.session()
        answers = mesh.generate(params={})
        assert (await session.submitted()).submit.model == "tokens"
        answers.call.cancel()
    with pytest.raises(InvalidArgument, match=r"sglang_grpc\.model is 'other'; served are: tiny"):
        async with run_mesh(sglang_grpc={"model": "other"}):
            pass


CALLS = {
    "Embed": sgl.EmbedRequest(),
    "StartProfile": common.StartProfileRequest(),
    "StopProfile": common.StopProfileRequest(),
    "LoadLoRAAdapter": sgl.LoadLoRAAdapterRequest(),
    "UnloadLoRAAdapter": sgl.UnloadLoRAAdapterRequest(),
}


@pytest.mark.parametrize("method", CALLS)
async def test_what_is_not_offered_is_refused_in_words(mesh: RouterMesh, method: str) -> None:
    with pytest.raises(Unimplemented, match=f"^{method}: "):
        await mesh.call(method, CALLS[method])


async def test_no_adapters_are_loaded(mesh: RouterMesh) -> None:
    answer = await mesh.call("ListLoadedLoRAAdapters", sgl.ListLoadedLoRAAdaptersRequest())
    assert answer == sgl.ListLoadedLoRAAdaptersResponse()


async def test_it_can_be_turned_off(run_mesh: MeshFactory) -> None:
    async with run_mesh(sglang_grpc={"serve": False}) as mesh:
        with pytest.raises(Unimplemented):
            await mesh.call("HealthCheck", sgl.HealthCheckRequest())
