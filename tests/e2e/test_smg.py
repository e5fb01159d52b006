"""smg, a real router, in front of a real mesh: its clients see one engine that no worker's death stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from chipmesh.sglang_grpc import sglang_scheduler_pb2_grpc
from chipmesh.sglang_grpc import smg_common_pb2 as common
from tests.support.mesh import RunningMesh, assert_page_identity, running_mesh
from tests.support.smg import PYTHON, Smg, Stream, needs_smg, running_smg

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), needs_smg]

MODEL = "smollm2-135m"
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two workers of the hash model, whose text is that of a real tokenizer."""
    with running_mesh(
        tmp_path_factory.mktemp("mesh"), "--model-path", MODEL, "--backend", "hash",
        "--device-groups", "hash:0,hash:1", "--backend-option", "step_ms=5",
    ) as mesh:  # fmt: skip
        yield mesh


@pytest.fixture(scope="module")
def smg(mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    folder = tmp_path_factory.mktemp("smg")
    with running_smg(mesh.description["gateway"]["address"], folder, model=MODEL) as smg:
        yield smg


def ask_directly(mesh: RunningMesh, path: str, **body: Any) -> Any:
    """The same request at the gateway's own OpenAI interface."""
    request = urllib.request.Request(
        f"http://{mesh.description['gateway']['openai_address']}{path}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def busy_worker(mesh: RunningMesh) -> dict[str, Any]:
    """The one replica that runs something."""
    deadline = time.monotonic() + 10
    while True:
        busy = [replica for replica in mesh.replicas() if replica["running"]]
        if len(busy) == 1:
            return busy[0]
        assert time.monotonic() < deadline, mesh.replicas()


def test_chat_and_completions_have_the_text_that_our_own_interface_gives(mesh: RunningMesh, smg: Smg) -> None:
    theirs = smg.post("/v1/chat/completions", **CHAT, max_tokens=48)
    ours = ask_directly(mesh, "/v1/chat/completions", **CHAT, max_tokens=48)
    assert theirs["choices"][0]["message"]["content"] == ours["choices"][0]["message"]["content"]
    assert theirs["choices"][0]["finish_reason"] == ours["choices"][0]["finish_reason"] == "length"
    for name in ("prompt_tokens", "completion_tokens"):
        assert theirs["usage"][name] == ours["usage"][name]
    raw = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    completed = smg.post("/v1/completions", **raw)
    assert (
        completed["choices"][0]["text"] == ask_directly(mesh, "/v1/completions", **raw)["choices"][0]["text"]
    )


def test_a_stream_is_the_whole_answer_in_pieces(smg: Smg) -> None:
    whole = smg.post("/v1/chat/completions", **CHAT, max_tokens=64)["choices"][0]
    stream = smg.stream("/v1/chat/completions", **CHAT, max_tokens=64)
    stream.read_to_end()
    assert stream.text == whole["message"]["content"]
    assert stream.finish_reason == whole["finish_reason"]


def test_choices_stops_and_logprobs_work_and_the_rest_is_refused_in_words(smg: Smg) -> None:
    answer = smg.post("/v1/chat/completions", **{**CHAT, "temperature": 1}, max_tokens=8, n=2, logprobs=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(len(choice["logprobs"]["content"]) == 8 for choice in answer["choices"])
    text = smg.post("/v1/chat/completions", **CHAT, max_tokens=32)["choices"][0]["message"]["content"]
    stopped = smg.post("/v1/chat/completions", **CHAT, max_tokens=32, stop=[text[20:26]])["choices"][0]
    assert stopped["message"]["content"] == text[:20]
    assert stopped["finish_reason"] == "stop"
    status, message = smg.refusal("/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2, max_tokens=4)
    assert status == 400
    assert "top_logprobs_num is 2; only chosen tokens have a log-probability" in message


def test_a_client_that_goes_away_gives_its_pages_back(mesh: RunningMesh, smg: Smg) -> None:
    stream = smg.stream("/v1/chat/completions", **CHAT, max_tokens=4000, ignore_eos=True)
    for _ in range(4):
        assert stream.read()
    assert busy_worker(mesh)["pages"]["held"] > 0
    stream.close()
    assert_page_identity(mesh.wait_until_idle())


def test_the_routers_cache_aware_policy_knows_what_the_mesh_has_cached(smg: Smg) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "Tell me of the river Rhine. " * 12}]}
    smg.post("/v1/chat/completions", **long, max_tokens=4)
    smg.wait_for_metric('smg_kv_event_blocks_total{worker="grpc', 4)
    hits = smg.metric('smg_cache_aware_policy_branch_total{branch="event_hit"')
    again = smg.post("/v1/chat/completions", **long, max_tokens=4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    smg.wait_for_metric('smg_cache_aware_policy_branch_total{branch="event_hit"', hits + 1)


def test_the_router_sees_the_load_of_the_whole_mesh(mesh: RunningMesh, smg: Smg) -> None:
    (load,) = wait_for_loads(smg)
    assert load["max_total_num_tokens"] == sum(
        replica["pages"]["total"] * replica["page_size_tokens"] for replica in mesh.replicas()
    )
    assert load["max_running_requests"] > 0


def wait_for_loads(smg: Smg) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 15
    while not (loads := smg.get("/loads")["loads"]):
        assert time.monotonic() < deadline, "smg has polled no load"
        time.sleep(0.05)
    return list(loads)


def test_a_workers_death_under_streams_is_not_seen_by_their_clients(mesh: RunningMesh, smg: Smg) -> None:
    check_death_is_not_seen(mesh, smg, streams=8, tokens=300)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.nightly
def test_structured_output_and_a_workers_death_with_a_real_model(tmp_path: Path) -> None:
    with (
        running_mesh(
            tmp_path, "--model-path", MODEL, "--dtype", "float32", "--device-groups", "cpu:0,cpu:1"
        ) as mesh,
        running_smg(mesh.description["gateway"]["address"], tmp_path, model=MODEL) as smg,
    ):
        check_death_is_not_seen(mesh, smg, streams=4, tokens=120)
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        answer = smg.post("/v1/chat/completions", **CHAT, max_tokens=80, response_format=wanted)["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert set(json.loads(answer["message"]["content"])) == {"name", "age"}
        status, message = smg.refusal("/v1/chat/completions", **CHAT, max_tokens=80, regex="[")
        assert (status, "sampling_params.regex" in message) == (400, True)


def check_death_is_not_seen(mesh: RunningMesh, smg: Smg, *, streams: int, tokens: int) -> None:
    """Texts are those of undisturbed streams, though one of two workers is killed under them."""

    def open_stream(index: int) -> Stream:
        messages = [{"role": "user", "content": f"Name {index + 3} rivers of Europe."}]
        return smg.stream(
            "/v1/chat/completions", **{**CHAT, "messages": messages}, max_tokens=tokens, ignore_eos=True
        )

    undisturbed = [open_stream(index) for index in range(streams)]
    for stream in undisturbed:
        stream.read_to_end()
    disturbed = [open_stream(index) for index in range(streams)]
    for stream in disturbed:
        assert stream.read()
    victim = next(replica for replica in mesh.replicas() if replica["running"])
    os.kill(victim["executor_pid"], signal.SIGKILL)
    for stream, expected in zip(disturbed, undisturbed, strict=True):
        stream.read_to_end()
        assert stream.text == expected.text
        assert stream.finish_reason == "length"
    assert smg.get("/workers")["workers"][0]["is_healthy"]


def test_a_raw_client_reads_loads_and_caches_and_flushes_them(mesh: RunningMesh) -> None:
    with grpc.insecure_channel(mesh.description["gateway"]["address"]) as channel:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)
        events = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=30)
        assert next(events).HasField("snapshot")
        request = sgl.GenerateRequest(tokenized=sgl.TokenizedInput(input_ids=range(100, 180)))
        request.sampling_params.max_new_tokens = 2
        (answer,) = stub.Generate(request, timeout=30)
        assert (answer.complete.finish_reason, answer.complete.completion_tokens) == ("length", 2)
        wanted, seen = list(range(100, 164)), list[int]()
        for batch in events:
            for event in batch.events:
                seen = [token for block in event.stored.blocks for token in block.token_ids]
            if seen[: len(wanted)] == wanted:
                break
        mesh.wait_until_idle()
        assert stub.FlushCache(common.FlushCacheRequest(), timeout=10).success
        removed = next(
            event.removed
            for batch in events
            for event in batch.events
            if event.WhichOneof("data") == "removed"
        )
        assert removed.block_hashes
        events.cancel()
        load = stub.GetLoads(sgl.GetLoadsRequest(), timeout=10).loads[0]
        assert (load.num_running_reqs, load.num_used_tokens) == (0, 0)


# What their generated code says, as JSON: {message: {field: fact_of}} and {method: [in, out, streams]}.
THEIRS = """
import json
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2
messages, methods = {}, {}
def fact_of(field):
    return [field.number, field.type, field.message_type.full_name if field.message_type else ""]
def walk(found):
    for each in found:
        messages[each.full_name] = {field.name: fact_of(field) for field in each.fields}
        walk(each.nested_types)
for file in (common_pb2, sglang_scheduler_pb2):
    walk(file.DESCRIPTOR.message_types_by_name.values())
for m in sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"].methods:
    methods[m.name] = [m.input_type.full_name, m.output_type.full_name, m.server_streaming]
print(json.dumps([messages, methods]))
"""


def test_our_copy_of_the_contract_has_their_names_numbers_and_types() -> None:
    done = subprocess.run([PYTHON, "-c", THEIRS], capture_output=True, text=True, timeout=60, check=True)
    messages, methods = json.loads(done.stdout)
    ours = dict(fields_of(sgl.DESCRIPTOR)) | dict(fields_of(common.DESCRIPTOR))
    for message, fields in ours.items():
        assert fields.items() <= messages[message].items(), message
    service = sgl.DESCRIPTOR.services_by_name["SglangScheduler"]
    assert {
        method.name: [method.input_type.full_name, method.output_type.full_name, method.server_streaming]
        for method in service.methods
    } == methods


def fields_of(file: FileDescriptor) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    def walk(message: Descriptor) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        yield message.full_name, {field.name: fact_of(field) for field in message.fields}
        for nested in message.nested_types:
            yield from walk(nested)

    for message in file.message_types_by_name.values():
        yield from walk(message)


def fact_of(field: FieldDescriptor) -> list[Any]:
    return [field.number, field.type, field.message_type.full_name if field.message_type else ""]
