"""What a router's request means to the mesh: zeros, refusals, and errors in the router's words."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from gateway.sglang_grpc.reading import MAX_ID_CHARS, in_router_words, read_request
from gateway.tenant import Tenant
from gateway.validation import read_options
from meshkit.errors import InvalidArgument
from tests.unit.gateway.tiny_model import VOCAB_SIZE, write_tiny_model

ROUTER_DOC = Path(__file__).resolve().parents[3] / "docs" / "router.md"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from gateway.config import ServedModelConfig
    from gateway.models import open_served_model

    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return open_served_model(ServedModelConfig(name="tiny", path=str(folder)), cache_dir=folder.parent)


def asked(params: dict[str, Any] | None = None, **fields: Any) -> pb.GenerateRequest:
    """What the mesh is asked for by a request with these fields."""
    request = sgl.GenerateRequest(tokenized=sgl.TokenizedInput(input_ids=[1, 2]), **fields)
    if params is not None:
        request.sampling_params.CopyFrom(sgl.SamplingParams(**params))
    return read_request(request, model="tiny", tenant=Tenant(), time_left_s=None).request


def seed_of(value: Any) -> Struct:
    custom = Struct()
    custom.update({"seed": value})
    return custom


def test_a_message_of_zeros_is_greedy_and_restricts_nothing(tiny: Any) -> None:
    options = read_options(asked({}), tiny, draw_seed=lambda: 7, max_resume_window_s=60)
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    assert options.max_tokens is None
    assert options.seed_is_drawn
    assert not options.logprobs
    assert not options.stop.ignore_eos


def test_without_the_message_it_is_as_other_requests_without_fields(tiny: Any) -> None:
    options = read_options(asked(), tiny, draw_seed=lambda: 7, max_resume_window_s=60)
    plain = read_options(pb.GenerateRequest(model="tiny"), tiny, draw_seed=lambda: 7, max_resume_window_s=60)
    assert options.sampling == plain.sampling
    assert options.stop == plain.stop


def test_what_smg_fills_in_means_the_same_as_what_it_means(tiny: Any) -> None:
    filled = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1}
    options = read_options(asked(filled), tiny, draw_seed=lambda: 7, max_resume_window_s=60)
    assert options.sampling.top_k == 0
    assert options.sampling.temperature == 1.0


def test_fields_reach_the_mesh() -> None:
    request = asked({
        "temperature": 0.5, "top_p": 0.25, "top_k": 4, "min_p": 0.125, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "repetition_penalty": 1.5, "max_new_tokens": 9, "min_new_tokens": 2,
        "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "logit_bias": {"5": 2.0},
        "custom_params": seed_of(12),
    }, return_logprob=True)  # fmt: skip
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 4, 0.125)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.seed, dict(sampling.logit_bias)) == (1.5, 12, {5: 2.0})
    assert (stop.max_tokens, stop.min_tokens, list(stop.stop_strings)) == (9, 2, ["x"])
    assert (list(stop.stop_token_ids), stop.ignore_eos, request.logprobs) == ([3], True, True)


@pytest.mark.parametrize(
    ("kind", "ours"), [("regex", "regex"), ("json_schema", "json_schema"), ("ebnf_grammar", "grammar")]
)
def test_a_constraint_reaches_the_mesh_as_its_own_kind(kind: str, ours: str) -> None:
    constraint = asked({kind: "text"}).sampling.constraint
    assert constraint.WhichOneof("form") == ours
    assert getattr(constraint, ours) == "text"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("mm_inputs", {"mm_inputs": sgl.MultimodalInputs()}),
        ("logprob_start_len", {"logprob_start_len": 1}),
        ("top_logprobs_num", {"top_logprobs_num": 1}),
        ("token_ids_logprob", {"token_ids_logprob": [1]}),
        ("return_hidden_states", {"return_hidden_states": True}),
        ("disaggregated_params", {"disaggregated_params": sgl.DisaggregatedParams()}),
        ("custom_logit_processor", {"custom_logit_processor": "x"}),
        ("input_embeds", {"input_embeds": [0.5]}),
        ("lora_id", {"lora_id": "x"}),
        ("data_parallel_rank", {"data_parallel_rank": 1}),
        ("request_id", {"request_id": "x" * (MAX_ID_CHARS + 1)}),
        ("request_id", {"request_id": "a\nb"}),
        ("sampling_params.n", {"params": {"n": 129}}),
        ("sampling_params.structural_tag", {"params": {"structural_tag": "x"}}),
        ("sampling_params.logit_bias[x]", {"params": {"logit_bias": {"x": 1.0}}}),
        ("sampling_params.custom_params.seed", {"params": {"custom_params": seed_of(0.5)}}),
        ("sampling_params.custom_params.seed", {"params": {"custom_params": seed_of("a")}}),
        ("sampling_params.custom_params.seed", {"params": {"custom_params": seed_of(math.inf)}}),
        ("sampling_params.temperature", {"params": {"temperature": math.nan}}),
        ("sampling_params.top_p", {"params": {"top_p": 2.0}}),
        ("sampling_params.top_k", {"params": {"top_k": -2}}),
        ("sampling_params.max_new_tokens", {"params": {"max_new_tokens": 0}}),
        ("sampling_params.stop[0]", {"params": {"stop": [""]}}),
        ("sampling_params.stop_token_ids[0]", {"params": {"stop_token_ids": [VOCAB_SIZE]}}),
        ("sampling_params.logit_bias[300]", {"params": {"logit_bias": {"300": 1.0}}}),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_routers_field(
    tiny: Any, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument) as caught, in_router_words():
        read_options(asked(**fields), tiny, draw_seed=lambda: 7, max_resume_window_s=60)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("fields", [{"data_parallel_rank": 0}, {"logprob_start_len": -1}])
def test_fields_that_say_what_is_so_anyway_are_allowed(fields: dict[str, Any]) -> None:
    assert asked(**fields).model == "tiny"


FLOATS = st.floats(width=32)
PARAMS = st.builds(
    sgl.SamplingParams,
    temperature=FLOATS, top_p=FLOATS, min_p=FLOATS, frequency_penalty=FLOATS, presence_penalty=FLOATS,
    repetition_penalty=FLOATS, top_k=st.integers(-(2**31), 2**31 - 1),
    max_new_tokens=st.none() | st.integers(0, 2**32 - 1), min_new_tokens=st.integers(0, 2**32 - 1),
    stop=st.lists(st.text(max_size=5), max_size=20), stop_token_ids=st.lists(st.integers(0, 400), max_size=3),
    n=st.integers(0, 200),
    logit_bias=st.dictionaries(st.text("0123456789-x", max_size=4), FLOATS, max_size=2),
)  # fmt: skip


@given(params=PARAMS, request_id=st.text(max_size=140), logprob_start=st.integers(-3, 3))
def test_whatever_comes_is_served_or_refused_as_the_callers_fault(
    tiny: Any, params: sgl.SamplingParams, request_id: str, logprob_start: int
) -> None:
    request = sgl.GenerateRequest(
        request_id=request_id, sampling_params=params, logprob_start_len=logprob_start
    )
    refusal = None
    try:
        with in_router_words():
            wanted = read_request(request, model="tiny", tenant=Tenant(), time_left_s=None)
            read_options(wanted.request, tiny, draw_seed=lambda: 7, max_resume_window_s=60)
    except InvalidArgument as error:
        refusal = error
    assert refusal is None or refusal.field is not None


def test_the_documentation_has_every_field() -> None:
    text = ROUTER_DOC.read_text(encoding="utf-8")
    words = set(re.findall(r"`([a-z_]+)`", text))
    for message in (sgl.GenerateRequest, sgl.SamplingParams):
        missing = {field.name for field in message.DESCRIPTOR.fields} - words
        assert not missing, f"fields of {message.DESCRIPTOR.name} that docs/router.md says nothing of"
