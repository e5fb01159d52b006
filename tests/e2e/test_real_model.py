"""The whole mesh with the real model in float32, by real processes and sockets."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chipmesh.inference.v1alpha1 import inference_pb2
from tests.support.golden import Golden, load_golden
from tests.support.mesh import Generation, RunningMesh, assert_page_identity, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PAGE = 16


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One cpu worker with the model that scripts/test.sh pulled."""
    state_dir = tmp_path_factory.mktemp("mesh")
    with running_mesh(
        state_dir, "--model-path", "smollm2-135m", "--dtype", "float32", "--page-size", str(PAGE)
    ) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def golden() -> list[Golden]:
    return load_golden()


def generate(mesh: RunningMesh, golden: Golden) -> Generation:
    return mesh.client.generate(token_request(golden.prompt_token_ids, max_tokens=48))


def test_generate_prints_one_json_object_with_everything_a_script_needs(mesh: RunningMesh) -> None:
    answer = mesh.cli_json("generate", "Name a colour.", "--max-tokens", "8", "--temperature", "0")
    assert answer["finish_reason"] in {"stop", "length"}
    assert 1 <= len(answer["token_ids"]) <= 8
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert "cached_tokens" in answer["usage"]
    assert answer["text"]
    assert (answer["group"], answer["chip"]) == ("default", "cpu")
    assert answer["worker"]


def test_raw_greedy_text_from_the_command_line_equals_the_reference(
    mesh: RunningMesh, golden: list[Golden]
) -> None:
    example = golden[0]
    answer = mesh.cli_json("generate", example.prompt, "--raw", "--max-tokens", "48", "--temperature", "0")
    assert answer["prompt_token_ids"] == example.prompt_token_ids
    example.check(answer["token_ids"])
    if answer["token_ids"] == example.token_ids:
        assert answer["text"] == example.text.replace("<|im_end|>", "")


def test_greedy_tokens_equal_the_reference_alone(mesh: RunningMesh, golden: list[Golden]) -> None:
    for example in golden[:2]:
        example.check(generate(mesh, example).token_ids, where="alone")


def test_greedy_tokens_equal_the_reference_in_a_batch_of_32(mesh: RunningMesh, golden: list[Golden]) -> None:
    batch = [golden[index % len(golden)] for index in range(32)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda example: generate(mesh, example), batch))
    for example, answer in zip(batch, answers, strict=True):
        example.check(answer.token_ids, where="batch of 32")


def test_a_prompt_seen_before_comes_from_the_cache_and_gives_the_same_text(mesh: RunningMesh) -> None:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(
            text="The quick brown fox jumps over the lazy dog near the river bank. " * 7
        ),
        sampling=inference_pb2.SamplingOptions(temperature=0.0),
        stop=inference_pb2.StopOptions(max_tokens=24),
    )
    first = mesh.client.generate(request)
    second = mesh.client.generate(request)
    length = len(first.accepted.prompt_token_ids)
    assert length >= 64
    assert first.finished is not None
    assert second.finished is not None
    assert first.finished.usage.cached_tokens == 0
    assert second.finished.usage.cached_tokens == (length - 1) // PAGE * PAGE
    assert second.text == first.text


def test_64_streams_of_mixed_lengths_all_complete_and_leave_no_page_behind(
    mesh: RunningMesh, golden: list[Golden]
) -> None:
    def one(index: int) -> Generation:
        prompt = golden[index % len(golden)].prompt_token_ids[: 1 + index % 12]
        return mesh.client.generate(
            token_request(prompt, max_tokens=1 + index % 20, seed=index, temperature=0.8)
        )

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    for index, answer in enumerate(answers):
        assert answer.finish_reason in {"stop", "length"}
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 1 + index % 20
    assert_page_identity(mesh.wait_until_idle())


def test_the_same_seed_draws_the_same_tokens_alone_and_among_others(
    mesh: RunningMesh, golden: list[Golden]
) -> None:
    def draw(seed: int) -> list[int]:
        request = token_request(
            golden[2].prompt_token_ids, max_tokens=12, temperature=0.9, top_p=0.95, seed=seed
        )
        return mesh.client.generate(request).token_ids

    alone = draw(7)
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(draw, [7, 8, 9, 10, 7, 11, 12, 13]))
    assert crowd[0] == crowd[4] == alone
    assert len({tuple(tokens) for tokens in crowd}) > 2


def test_a_cancel_in_the_middle_gives_pages_and_slots_back(mesh: RunningMesh, golden: list[Golden]) -> None:
    request = token_request(golden[1].prompt_token_ids, max_tokens=2000)
    request.stop.ignore_eos = True
    events = mesh.client.stream(request)
    accepted = next(events).accepted
    assert next(events).WhichOneof("kind") == "output"
    answer = mesh.client.stub.CancelGeneration(
        inference_pb2.CancelGenerationRequest(request_id=accepted.request_id)
    )
    assert answer.cancelled
    last = list(events)[-1]
    assert last.finished.reason == inference_pb2.Finished.REASON_CANCELLED
    assert_page_identity(mesh.wait_until_idle())


def test_chat_is_rendered_by_the_models_own_template(mesh: RunningMesh) -> None:
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Say hello.")])
    prompt = inference_pb2.Prompt(chat=chat)
    token_ids = mesh.client.stub.Tokenize(inference_pb2.TokenizeRequest(prompt=prompt)).token_ids
    answer = mesh.client.generate(
        inference_pb2.GenerateRequest(prompt=prompt, stop=inference_pb2.StopOptions(max_tokens=4))
    )
    assert list(answer.accepted.prompt_token_ids) == list(token_ids)
    assert token_ids[0] == 1, "the template begins with <|im_start|>"


def test_a_stop_string_ends_the_text_before_it(mesh: RunningMesh, golden: list[Golden]) -> None:
    request = token_request(golden[0].prompt_token_ids, max_tokens=48)
    whole = mesh.client.generate(request).text
    stop = whole[12:18]
    request.stop.stop_strings.append(stop)
    cut = mesh.client.generate(request)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finished is not None
    assert (cut.finish_reason, cut.finished.matched_stop) == ("stop", stop)
    assert_page_identity(mesh.wait_until_idle())


def test_metrics_and_health_of_every_service_can_be_scraped(mesh: RunningMesh) -> None:
    def get(address: str, path: str) -> str:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
            assert reply.status == 200
            text: str = reply.read().decode()
            return text

    services = [mesh.description["gateway"], mesh.description["scheduler"], *mesh.description["workers"]]
    for service in services:
        assert "chipmesh_" in get(service["http_address"], "/metrics")
        assert json.loads(get(service["http_address"], "/health"))
    scheduler = get(mesh.description["scheduler"]["http_address"], "/metrics")
    for name in ("num_running_reqs", "num_queue_reqs", "generation_tokens_total", "cached_tokens_total"):
        assert f"chipmesh_{name}" in scheduler
    gateway = get(mesh.description["gateway"]["http_address"], "/metrics")
    assert "chipmesh_time_to_first_token_seconds_bucket" in gateway


def test_status_shows_the_mesh_in_the_documented_form(mesh: RunningMesh) -> None:
    status: Any = mesh.status()
    assert status["scheduler"]["pid"] == mesh.description["scheduler"]["pid"]
    (group,) = status["groups"]
    assert group["weight"] == 1
    (replica,) = group["replicas"]
    assert replica["state"] == "ready"
    assert replica["emulated"] is False
    assert replica["instance_id"]


def test_a_slow_reader_costs_others_nothing_and_loses_nothing(
    mesh: RunningMesh, golden: list[Golden]
) -> None:
    slow = mesh.client.stream(token_request(golden[3].prompt_token_ids, max_tokens=24))
    generation = Generation(next(slow).accepted)
    done = threading.Event()

    def others() -> None:
        generate(mesh, golden[0])
        done.set()

    thread = threading.Thread(target=others)
    thread.start()
    assert done.wait(60), "the others were held up by a reader who reads nothing"
    thread.join()
    for event in slow:
        generation.add(event)
    assert generation.finished is not None
    binding = golden[3].binding_tokens()[:24]
    assert generation.token_ids[: len(binding)] == binding


def test_a_live_worker_is_profiled_while_its_streams_go_on(
    mesh: RunningMesh, golden: list[Golden], tmp_path: Path
) -> None:
    profiled = threading.Event()

    def keep_asking(example: Golden) -> None:
        while not profiled.is_set():
            example.check(generate(mesh, example).token_ids, where="beside a profile")

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking, example) for example in golden[:2]]
        try:
            summary = mesh.cli_json("profile", "--seconds", "0.5", "--output", str(tmp_path / "trace.json"))
        finally:
            profiled.set()
        for each in asking:
            each.result()
    shares = {line["class"]: line["share"] for line in summary["classes"]}
    assert {"attention", "linear", "mlp"} <= set(shares)
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"step", "attention"} <= {event.get("cat") for event in trace["traceEvents"]}
