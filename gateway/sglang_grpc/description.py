"""What a router asks when it registers the mesh: the model, and the server."""

from __future__ import annotations

import time

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from gateway.models import ServedModel


def model_info(model: ServedModel) -> sgl.GetModelInfoResponse:
    """Facts of the model. Its name stands for its path, which is of no use elsewhere; the router gets the
    tokenizer by GetTokenizer.
    """
    config = {} if model.folder is None else model.folder.config
    return sgl.GetModelInfoResponse(
        model_path=model.name,
        is_generation=True,
        served_model_name=model.name,
        max_context_length=model.context_tokens,
        vocab_size=model.vocab_size,
        model_type=str(config.get("model_type", "")),
        architectures=[str(each) for each in config.get("architectures", ())],
        eos_token_ids=model.eos_token_ids,
        pad_token_id=_token_id(model, "pad_token"),
        bos_token_id=_token_id(model, "bos_token"),
        max_req_input_len=model.context_tokens - 1,
    )


def server_info(
    model: ServedModel, *, version: str, uptime_s: float, active_requests: int
) -> sgl.GetServerInfoResponse:
    """Facts of the gateway: one engine of one rank, whatever is behind it."""
    arguments: dict[str, str | int] = {
        "model_path": model.name,
        "served_model_name": model.name,
        "context_length": model.context_tokens,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
    }
    server_args, scheduler_info, start_time = Struct(), Struct(), Timestamp()
    server_args.update(arguments)
    scheduler_info.update({"max_req_input_len": model.context_tokens - 1})
    start_time.FromNanoseconds(int((time.time() - uptime_s) * 1e9))
    return sgl.GetServerInfoResponse(
        server_args=server_args,
        scheduler_info=scheduler_info,
        active_requests=active_requests,
        uptime_seconds=uptime_s,
        sglang_version=version,
        server_type="grpc",
        start_time=start_time,
    )


def _token_id(model: ServedModel, name: str) -> int:
    """Of a token by its name in tokenizer_config.json; 0, which is proto3's absent, where there is none."""
    token = None if model.folder is None else model.folder.tokenizer_config.get(name)
    if not isinstance(token, str) or model.text is None:
        return 0
    return model.text.tokenizer.id_of(token) or 0
