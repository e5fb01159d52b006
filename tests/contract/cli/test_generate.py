"""`chipmesh generate` against a gateway, or several of which some are lost."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.cli import gateway_tries, main
from tests.contract.cli.conftest import ScriptedGateway, served


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHIPMESH_STATE_DIR", str(tmp_path))


def a_generation() -> list[inference_pb2.GenerationEvent]:
    """Two messages of output, the second with a character whose text lagged."""
    return [
        inference_pb2.GenerationEvent(
            accepted=inference_pb2.Accepted(request_id="r1", model="m", prompt_token_ids=[5, 6])
        ),
        inference_pb2.GenerationEvent(output=inference_pb2.Output(token_ids=[1, 2], text="Bl")),
        inference_pb2.GenerationEvent(output=inference_pb2.Output(first_index=2, token_ids=[3], text="äue")),
        inference_pb2.GenerationEvent(
            finished=inference_pb2.Finished(
                reason=inference_pb2.Finished.REASON_STOP,
                usage=inference_pb2.Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1),
                placement=inference_pb2.Placement(group="default", worker="worker-0", chip="hash"),
            )
        ),
    ]


def test_text_is_streamed_to_the_terminal(
    gateway: ScriptedGateway, gateway_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.events = a_generation()
    assert main(["generate", "Why?", "--endpoint", gateway_address]) == 0
    assert capsys.readouterr().out == "Bläue\n"


def test_json_is_one_object_with_all_that_is_promised(
    gateway: ScriptedGateway, gateway_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.events = a_generation()
    assert main(["generate", "Why?", "--endpoint", gateway_address, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert {name: answer[name] for name in ("text", "token_ids", "prompt_token_ids", "finish_reason")} == {
        "text": "Bläue",
        "token_ids": [1, 2, 3],
        "prompt_token_ids": [5, 6],
        "finish_reason": "stop",
    }
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1}
    assert (answer["group"], answer["worker"], answer["chip"]) == ("default", "worker-0", "hash")


def test_what_is_not_given_is_left_to_the_gateway(gateway: ScriptedGateway, gateway_address: str) -> None:
    gateway.events = a_generation()
    main(["generate", "Why?", "--endpoint", gateway_address])
    assert gateway.request.sampling == inference_pb2.SamplingOptions()
    assert gateway.request.stop == inference_pb2.StopOptions()
    (message,) = gateway.request.prompt.chat.messages
    assert (message.role, message.content) == ("user", "Why?")


def test_zeros_and_nan_travel_as_given_so_that_the_gateway_can_judge_them(
    gateway: ScriptedGateway, gateway_address: str
) -> None:
    gateway.events = a_generation()
    flags = [
        "--max-tokens",
        "0",
        "--temperature",
        "nan",
        "--top-k",
        "0",
        "--seed",
        "0",
        "--stop",
        "a",
        "--stop",
        "b",
    ]
    main(["generate", "Why?", "--endpoint", gateway_address, *flags])
    sampling, stop = gateway.request.sampling, gateway.request.stop
    assert stop.HasField("max_tokens")
    assert sampling.HasField("seed")
    assert sampling.HasField("top_k")
    assert math.isnan(sampling.temperature)
    assert list(stop.stop_strings) == ["a", "b"]


def test_raw_text_goes_without_a_template(gateway: ScriptedGateway, gateway_address: str) -> None:
    gateway.events = a_generation()
    main(["generate", "<|im_start|>user", "--raw", "--endpoint", gateway_address])
    assert gateway.request.prompt.text == "<|im_start|>user"


def test_a_system_message_comes_before_the_prompt(gateway: ScriptedGateway, gateway_address: str) -> None:
    gateway.events = a_generation()
    main(["generate", "Why?", "--system", "Be brief.", "--endpoint", gateway_address])
    assert [message.role for message in gateway.request.prompt.chat.messages] == ["system", "user"]


def test_a_refusal_is_one_line_and_with_json_an_object(
    gateway: ScriptedGateway, gateway_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.error = (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens is 0; at least 1")
    assert main(["generate", "Why?", "--max-tokens", "0", "--endpoint", gateway_address, "--json"]) == 1
    output = capsys.readouterr()
    assert output.err == "chipmesh: max_tokens is 0; at least 1\n"
    assert json.loads(output.out)["error"]["code"] == "INVALID_ARGUMENT"


def test_a_stream_without_its_last_event_is_an_error(
    gateway: ScriptedGateway, gateway_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.events = a_generation()[:-1]
    assert main(["generate", "Why?", "--endpoint", gateway_address]) == 1
    assert "ended without saying why" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (["--top-k", "99999999999"], 1, "top_k"),
        (["--seed", "-1"], 1, "seed"),
        (["--raw", "--system", "x"], 1, "system"),
        (["--max-tokens", "many"], 2, "--max-tokens"),
        (["--bogus"], 2, "--bogus"),
    ],
)
def test_flags_that_no_request_can_carry_are_named(
    flags: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Why?", "--endpoint", "127.0.0.1:1", *flags]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


def test_a_prompt_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "broken \udcff", "--endpoint", "127.0.0.1:1"]) == 1
    assert "prompt" in capsys.readouterr().err


def test_a_gateway_that_is_not_there_is_told_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Why?", "--endpoint", "127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no gateway answers at 127.0.0.1:1" in line


# A gateway that is lost in mid-stream.


Script = Sequence["inference_pb2.GenerationEvent | grpc.StatusCode"]

SEED = inference_pb2.SamplingOptions(temperature=0.5, seed=7)
ACCEPTED = inference_pb2.GenerationEvent(
    accepted=inference_pb2.Accepted(request_id="r1", model="m", effective_sampling=SEED)
)
FINISHED = a_generation()[-1]
LOST = grpc.StatusCode.UNAVAILABLE


def output(first_index: int, token_ids: Sequence[int], text: str) -> inference_pb2.GenerationEvent:
    return inference_pb2.GenerationEvent(
        output=inference_pb2.Output(first_index=first_index, token_ids=token_ids, text=text)
    )


class LosableGateway(ScriptedGateway):
    """Plays one script for each call, the last one again and again; keeps all requests."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__()
        self.scripts = scripts
        self.requests: list[inference_pb2.GenerateRequest] = []

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        for step in self.scripts[min(len(self.requests), len(self.scripts)) - 1]:
            if isinstance(step, inference_pb2.GenerationEvent):
                yield inference_pb2.GenerateResponse(event=step)
            else:
                context.abort(step, "lost on purpose")


@contextlib.contextmanager
def gateways(*losable: LosableGateway) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        yield [stack.enter_context(served(functools.partial(add, each))) for each in losable]


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_tries, "FIRST_PAUSE_S", 0.0)


def test_a_generation_goes_on_at_the_next_gateway_with_what_came(
    no_pause: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = LosableGateway([ACCEPTED, output(0, [1, 2], "Bl"), LOST])
    second = LosableGateway([ACCEPTED, output(2, [3], "äue"), FINISHED])
    with gateways(first, second) as addresses:
        assert (
            main(["generate", "Why?", "--max-tokens", "9", "--gateway", ",".join(addresses), "--json"]) == 0
        )
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert (answer["text"], answer["token_ids"]) == ("Bläue", [1, 2, 3])
    asked, again = first.requests[0], second.requests[0]
    assert (again.request_id, again.sampling, list(again.output_token_ids)) == ("r1", SEED, [1, 2])
    assert (again.prompt, again.stop) == (asked.prompt, asked.stop)
    (line,) = said.err.splitlines()
    assert line.startswith("chipmesh: ")
    assert f"going on after 2 tokens at {addresses[1]} (try 1 of at most {gateway_tries.MOST_TRIES})" in line


def test_a_lone_gateway_that_comes_back_goes_on(no_pause: None, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = LosableGateway(
        [ACCEPTED, output(0, [1], "a"), LOST],
        [grpc.StatusCode.RESOURCE_EXHAUSTED],
        [ACCEPTED, output(1, [2], "b"), LOST],
        [ACCEPTED, output(2, [3], "c"), FINISHED],
    )
    with gateways(gateway) as addresses:
        assert main(["generate", "Why?", "--gateway", addresses[0]]) == 0
    assert capsys.readouterr().out == "abc\n"
    assert [list(request.output_token_ids) for request in gateway.requests] == [[], [1], [1], [1, 2]]


def test_text_that_came_without_its_end_is_not_told_twice(
    no_pause: None, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = LosableGateway(
        [ACCEPTED, output(0, [1], "a"), output(1, [], "held"), LOST],
        [ACCEPTED, output(1, [], "held"), FINISHED],
    )
    with gateways(gateway) as addresses:
        assert main(["generate", "Why?", "--gateway", addresses[0]]) == 0
    assert capsys.readouterr().out == "aheld\n"


def test_tries_are_bounded(no_pause: None, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = LosableGateway([ACCEPTED, LOST])
    with gateways(gateway) as addresses:
        assert main(["generate", "Why?", "--gateway", addresses[0]]) == 1
    assert len(gateway.requests) == 1 + gateway_tries.MOST_TRIES
    assert len(capsys.readouterr().err.splitlines()) == 1 + gateway_tries.MOST_TRIES


def test_a_refusal_is_not_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = LosableGateway([ACCEPTED, grpc.StatusCode.ABORTED]), LosableGateway([ACCEPTED, FINISHED])
    with gateways(first, second) as addresses:
        assert main(["generate", "Why?", "--gateway", ",".join(addresses)]) == 1
    assert not second.requests
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_gateways_are_asked_in_turn_until_one_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    serving = LosableGateway([ACCEPTED, output(0, [1], "a"), FINISHED])
    with gateways(serving) as addresses:
        assert main(["generate", "Why?", "--gateway", f"127.0.0.1:1,{addresses[0]}"]) == 0
    said = capsys.readouterr()
    assert said.out == "a\n"
    assert "no gateway answers at 127.0.0.1:1" in said.err
    assert main(["generate", "Why?", "--gateway", "127.0.0.1:1,127.0.0.1:1"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("gateway", [",", "127.0.0.1:1,", " "])
def test_an_empty_address_is_refused(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Why?", "--gateway", gateway]) in (1, 2)
    assert "gateway is" in capsys.readouterr().err
