"""What lies on a limit is allowed and counts as given; what lies beyond it is in the contract tests."""

from __future__ import annotations

from typing import Any

import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.generation_spec import GenerationSpec, Scheduling
from gateway.models import ServedModel
from gateway.validation import check_request_id, complete, read_options, read_token_prompt
from meshkit.errors import InvalidArgument
from tests.unit.gateway.tiny_model import CONTEXT_TOKENS, IM_END, VOCAB_SIZE

DRAWN_SEED = 42


def spec_of(model: ServedModel, *, prompt_length: int = 2, **fields: Any) -> GenerationSpec:
    request = pb.GenerateRequest(
        sampling=pb.SamplingOptions(**fields.get("sampling", {})),
        stop=pb.StopOptions(**fields.get("stop", {})),
        scheduling=pb.SchedulingOptions(**fields.get("scheduling", {})),
    )
    options = read_options(request, model, draw_seed=lambda: DRAWN_SEED, max_resume_window_s=60.0)
    prompt = [1] * prompt_length
    return complete(options, model, request_id="r", prompt_token_ids=prompt, field="prompt.text")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0.0, 100.0),
        ("top_p", 2.0**-20, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 2.0**-20, 10.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
    ],
)
def test_both_ends_of_a_range_are_allowed(tiny: ServedModel, name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(spec_of(tiny, sampling={name: value}).sampling, name) == value


def test_an_explicit_zero_is_not_an_absent_field(tiny: ServedModel) -> None:
    assert spec_of(tiny, sampling={"temperature": 0.0, "seed": 0}).sampling.temperature == 0.0
    assert spec_of(tiny, sampling={"temperature": 0.0, "seed": 0}).sampling.seed == 0
    assert spec_of(tiny).sampling.temperature == 1.0
    assert spec_of(tiny).sampling.seed == DRAWN_SEED


@pytest.mark.parametrize(("given", "effective"), [(-1, 0), (0, 0), (1, 1), (2**31 - 1, 2**31 - 1)])
def test_every_way_to_say_all_tokens_becomes_top_k_0(tiny: ServedModel, given: int, effective: int) -> None:
    assert spec_of(tiny, sampling={"top_k": given}).sampling.top_k == effective


def test_the_longest_prompt_leaves_room_for_one_token(tiny: ServedModel) -> None:
    assert spec_of(tiny, prompt_length=CONTEXT_TOKENS - 1).stop.max_tokens == 1
    assert spec_of(tiny, prompt_length=CONTEXT_TOKENS - 1, stop={"min_tokens": 1}).stop.min_tokens == 1


def test_max_tokens_is_clipped_to_the_context(tiny: ServedModel) -> None:
    assert spec_of(tiny, stop={"max_tokens": 5}).stop.max_tokens == 5
    assert spec_of(tiny, stop={"max_tokens": 2**31 - 1}).stop.max_tokens == CONTEXT_TOKENS - 2


def test_stop_strings_at_their_limits_are_allowed(tiny: ServedModel) -> None:
    strings = [chr(0x4E00 + index) * 256 for index in range(16)]
    assert spec_of(tiny, stop={"stop_strings": strings}).stop.stop_strings == tuple(strings)


def test_end_tokens_are_the_models_and_the_clients_each_once(tiny: ServedModel) -> None:
    assert spec_of(tiny).end_token_ids == (IM_END,)
    assert spec_of(tiny, stop={"stop_token_ids": [5, IM_END, 5]}).end_token_ids == (IM_END, 5)
    assert spec_of(tiny, stop={"ignore_eos": True}).end_token_ids == ()


def test_the_last_id_of_the_vocabulary_is_allowed_everywhere(tiny: ServedModel) -> None:
    last = VOCAB_SIZE - 1
    assert list(read_token_prompt([0, last], tiny)) == [0, last]
    spec = spec_of(tiny, stop={"stop_token_ids": [last]}, sampling={"logit_bias": {last: -100.0, 0: 100.0}})
    assert spec.stop.stop_token_ids == (last,)
    assert spec.sampling.logit_bias == {last: -100.0, 0: 100.0}


@pytest.mark.parametrize("request_id", ["", "x", "x" * 128, "with spaces, ünïcode and 漢字"])
def test_printable_request_ids_are_allowed(request_id: str) -> None:
    check_request_id(request_id)


def test_where_and_when_a_request_runs_is_taken_over(tiny: ServedModel) -> None:
    given = {"priority": -1000, "cache_salt": "t" * 256, "session_key": "chat-1", "resume_window_ms": 60_000}
    scheduling = spec_of(tiny, scheduling=given).scheduling
    assert scheduling.resume_window_s == 60.0
    assert (scheduling.priority, scheduling.session_key) == (-1000, "chat-1")
    assert scheduling.cache_salt == "t" * 256
    assert spec_of(tiny).scheduling == Scheduling()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"priority": 1001}, "scheduling.priority"),
        ({"cache_salt": "t" * 257}, "scheduling.cache_salt"),
        ({"session_key": "t" * 257}, "scheduling.session_key"),
        ({"resume_window_ms": 60_001}, "scheduling.resume_window_ms"),
    ],
)
def test_scheduling_beyond_its_limits_is_refused_by_its_field(
    tiny: ServedModel, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        spec_of(tiny, scheduling=given)
    assert caught.value.field == field
