"""Outputs of a given form by real processes and the real model: they have it, and nothing else changes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jsonschema  # type: ignore[import-untyped]
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from tests.support.mesh import RunningMesh, assert_page_identity, running_mesh
from tests.support.schemas import SCHEMAS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PERSON = SCHEMAS[0]
STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 60, "maxLength": 120},
        "pages": {"type": "integer"},
    },
    "required": ["title", "pages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One cpu worker with the model that scripts/test.sh pulled, and chunks that prompts have several of."""
    arguments = ("--model-path", "smollm2-135m", "--dtype", "float32", "--chunked-prefill-size", "32")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *arguments) as mesh:
        yield mesh


def ask(
    text: str, *, max_tokens: int = 256, seed: int = 7, temperature: float = 1.0, **constraint: Any
) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(temperature=temperature, seed=seed)
    if constraint:
        sampling.constraint.CopyFrom(pb.OutputConstraint(**constraint))
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)])
    return pb.GenerateRequest(
        prompt=pb.Prompt(chat=chat), sampling=sampling, stop=pb.StopOptions(max_tokens=max_tokens)
    )


def with_logprobs(mesh: RunningMesh, request: pb.GenerateRequest) -> tuple[list[int], list[float]]:
    asked = pb.GenerateRequest()
    asked.CopyFrom(request)
    asked.logprobs = True
    outputs = [event.output for event in mesh.client.stream(asked)]
    return (
        [token for output in outputs for token in output.token_ids],
        [value for output in outputs for value in output.logprobs],
    )


def schema(value: Any) -> dict[str, Any]:
    return {"json_schema": json.dumps(value)}


def refusal(mesh: RunningMesh, request: pb.GenerateRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        mesh.client.generate(request)
    return refused.value


def test_every_output_of_twenty_schemas_parses_and_validates_at_temperature_1(mesh: RunningMesh) -> None:
    def one(index: int) -> None:
        wanted = SCHEMAS[index % len(SCHEMAS)]
        answer = mesh.client.generate(ask("Tell me something.", seed=index, **schema(wanted)))
        assert answer.finish_reason == "stop", (wanted, answer.text)
        jsonschema.validate(json.loads(answer.text), wanted, format_checker=jsonschema.FormatChecker())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(len(SCHEMAS))))


def test_each_form_is_kept(mesh: RunningMesh) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"[0-9]{3}-[a-f]{4}"}, r"[0-9]{3}-[a-f]{4}"),
        ({"grammar": 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]{1,8}/'},
         r"(hello|bye) [A-Z][a-z]{1,8}"),
        ({"grammar": 'root ::= "[" num ("," num)? "]"\nnum ::= [0-9] [0-9]?'}, r"\[\d{1,2}(,\d{1,2})?\]"),
        ({"choice": pb.Choices(texts=["yes", "no", 'may "be"\n'])}, r'yes|no|may "be"\n'),
    ]  # fmt: skip
    for constraint, wanted in forms:
        for seed in range(3):
            answer = mesh.client.generate(ask("Say it.", seed=seed, **constraint))
            assert answer.finish_reason == "stop"
            assert re.fullmatch(wanted, answer.text), (constraint, answer.text)


def test_greedy_constrained_output_is_the_same_alone_in_a_batch_and_from_the_cache(mesh: RunningMesh) -> None:
    request = ask("Write a story. " * 20, temperature=0.0, **schema(STORY))
    alone = mesh.client.generate(request).token_ids
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda _: mesh.client.generate(request).token_ids, range(4)))
    assert crowd == [alone] * 4


@pytest.mark.nightly
def test_neighbours_with_constraints_do_not_change_a_bit_of_others(mesh: RunningMesh) -> None:
    plain = [ask(f"Count from {index}.", max_tokens=16, seed=index) for index in range(8)]
    alone = [mesh.client.generate(request).token_ids for request in plain]
    values = [with_logprobs(mesh, request) for request in plain[:2]]
    bound = [ask(f"Person {index}.", seed=index, **schema(PERSON)) for index in range(8)]
    with ThreadPoolExecutor(16) as pool:
        mixed = [each for pair in zip(plain, bound, strict=True) for each in pair]
        answers = list(pool.map(mesh.client.generate, mixed))
        crowd = pool.map(lambda request: with_logprobs(mesh, request), [*plain[:2], *bound[:4]])
        for (tokens, logprobs), (wanted, wanted_logprobs) in zip(crowd, values, strict=False):
            # The library's sums over the vocabulary, of which they are made, follow the number of rows.
            assert tokens == wanted
            assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)
    assert [answer.token_ids for answer in answers[::2]] == alone
    for answer in answers[1::2]:
        jsonschema.validate(json.loads(answer.text), PERSON)


def test_a_stream_that_goes_on_at_another_gateway_call_keeps_its_form(mesh: RunningMesh) -> None:
    request = ask("A title.", **schema(STORY))
    whole = mesh.client.generate(request)
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.output_token_ids.extend(whole.token_ids[:17])
    rest, _ = with_logprobs(mesh, again)
    assert whole.token_ids[:17] + rest == whole.token_ids
    again.output_token_ids[:] = [5, 5, 5]
    refused = refusal(mesh, again)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_logprobs_are_those_among_the_tokens_that_the_form_allows(mesh: RunningMesh) -> None:
    request = ask("Answer.", temperature=1.0, regex="(a|b)c")
    token_ids, logprobs = with_logprobs(mesh, request)
    assert len(logprobs) == len(token_ids)
    # Where one token alone may follow, it has all of the probability: the end token, at the last place.
    assert logprobs[-1] == pytest.approx(0.0, abs=1e-6)
    assert all(value <= 0 for value in logprobs)


def test_min_tokens_does_not_break_the_form_and_ignore_eos_is_refused(mesh: RunningMesh) -> None:
    request = ask("Answer.", regex="a{1,6}")
    request.stop.min_tokens = 200
    answer = mesh.client.generate(request)
    assert (answer.text, answer.finish_reason) == ("a" * 6, "stop")
    request.stop.ignore_eos = True
    assert "ignore_eos" in str(refusal(mesh, request).details())


def test_bad_and_catastrophic_constraints_are_refused_and_the_next_one_works(mesh: RunningMesh) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"json_schema": '{"type": "fish"}'}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "((((a{1000}){1000}){1000}){1000})"}, "constraint"),
        ({"grammar": "start: ("}, "grammar"),
        ({"regex": ""}, "regex"),
    ]
    for constraint, field in bad:
        refused = refusal(mesh, ask("x", **constraint))
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in str(refused.details())
    assert mesh.client.generate(ask("x", regex="ok")).text == "ok"


def test_the_cost_of_masks_is_measured(mesh: RunningMesh) -> None:
    mesh.client.generate(ask("Person.", **schema(PERSON)))
    metrics = mesh.scrape("scheduler")
    counts = re.findall(r"chipmesh_constraint_mask_seconds_count\{.*\} (\S+)", metrics)
    assert sum(map(float, counts)) > 5


def test_a_kill_in_the_middle_does_not_change_a_byte(mesh: RunningMesh) -> None:
    requests = [
        ask(f"Story {index}.", seed=index, temperature=float(index % 2), max_tokens=200, **schema(STORY))
        for index in range(4)
    ]
    undisturbed = [mesh.client.generate(request) for request in requests]
    victim = mesh.description["workers"][0]["executor_pid"]
    killed: list[int] = []

    def one(request: pb.GenerateRequest) -> list[int]:
        tokens: list[int] = []
        for event in mesh.client.stream(request):
            tokens += event.output.token_ids
            if not killed and len(tokens) > 10:
                killed.append(len(tokens))
                os.kill(victim, signal.SIGKILL)
        return tokens

    with ThreadPoolExecutor(4) as pool:
        disturbed = list(pool.map(one, requests))
    assert killed, "no executor was killed in the middle"
    assert disturbed == [answer.token_ids for answer in undisturbed]
    for answer in undisturbed:
        jsonschema.validate(json.loads(answer.text), STORY)
    assert_page_identity(mesh.wait_until_idle())
