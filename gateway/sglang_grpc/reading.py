"""A router's request to what the mesh takes: zeros get their meaning, and what would be lost is refused.

docs/router.md has the table of fields; a test holds both together.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from gateway.openai_http.bodies import MAX_CHOICES
from gateway.openai_http.choices import Wanted
from gateway.openai_http.translation import logit_bias_of
from gateway.sglang_grpc.constraints import apply_constraint
from gateway.tenant import Tenant
from gateway.validation import MAX_REQUEST_ID_CHARS, check_request_id
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError

MAX_ID_CHARS = MAX_REQUEST_ID_CHARS - len(f"-{MAX_CHOICES}")
"""Of a request's id: each choice is a generation, whose id has the choice's number behind it."""
_MAX_SEED = 2**53
"""Beyond it the double that carries a seed is no integer any more."""

# What the mesh cannot do, and would change the output if it were ignored.
_REFUSED = {
    "mm_inputs": "this mesh takes text models' tokens only",
    "token_ids_logprob": "log-probabilities are those of chosen tokens only",
    "return_hidden_states": "hidden states never leave a chip",
    "disaggregated_params": "prefill and decode are not split here; put the router into regular mode",
    "custom_logit_processor": "code from outside is not run",
    "input_embeds": "prompts are token ids, in tokenized.input_ids",
    "lora_id": "no adapters are loaded",
}

# A field of ours -> the router's.
_FIELD_NAMES: Mapping[str, str] = {
    "prompt.tokens.token_ids": "tokenized.input_ids",
    "sampling.constraint.grammar": "sampling_params.ebnf_grammar",
    "sampling.constraint.": "sampling_params.",
    "stop.max_tokens": "sampling_params.max_new_tokens",
    "stop.min_tokens": "sampling_params.min_new_tokens",
    "stop.stop_strings": "sampling_params.stop",
    "stop.stop_token_ids": "sampling_params.stop_token_ids",
}
_SAMPLING = re.compile(r"\bsampling\.(?=[a-z_]+)|^(?=logit_bias\[)")


@contextmanager
def in_router_words() -> Iterator[None]:
    """An error about one of our fields leaves the block as one about the router's field."""
    try:
        yield
    except (InvalidArgument, FailedPrecondition) as error:
        if error.field is None:
            raise
        field, message = _restate(error.field), _restate(error.message)
        raise type(error)(message, field=field, reason=error.reason, **error.metadata) from error


def read_request(
    request: sgl.GenerateRequest, *, model: str, tenant: Tenant, time_left_s: float | None
) -> Wanted:
    """What the mesh is to generate; values are checked where all front doors have them checked.

    model: the served name. time_left_s: to the caller's deadline.

    Raises:
        InvalidArgument: a field asks for what the mesh does not have, or its id is none.
    """
    _refuse_unsupported(request)
    params = request.sampling_params
    if params.n > MAX_CHOICES:
        raise _refusal("sampling_params.n", f"is {params.n}", f"at most {MAX_CHOICES} choices are allowed")
    asked = pb.GenerateRequest(
        model=model,
        logprobs=request.return_logprob,
        scheduling=pb.SchedulingOptions(resume_window_ms=0),
    )
    if request.HasField("sampling_params"):
        asked.sampling.CopyFrom(_sampling(params))
        asked.stop.CopyFrom(_stop(params))
        apply_constraint(params, asked)
    return Wanted(
        request=asked,
        prompts=[pb.Prompt(tokens=pb.TokenPrompt(token_ids=request.tokenized.input_ids))],
        count=params.n or 1,
        name=_request_id(request),
        tenant=tenant,
        time_left_s=time_left_s,
    )


def _request_id(request: sgl.GenerateRequest) -> str:
    given = request.request_id
    if not given:
        return secrets.token_hex(16)
    check_request_id(given)
    if len(given) > MAX_ID_CHARS:
        raise _refusal("request_id", f"has {len(given)} characters", f"at most {MAX_ID_CHARS} are allowed")
    return given


def _sampling(params: sgl.SamplingParams) -> pb.SamplingOptions:
    """A zero is greedy as a temperature, and no restriction everywhere else."""
    return pb.SamplingOptions(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        seed=_seed(params),
        logit_bias=logit_bias_of(params.logit_bias),
    )


def _stop(params: sgl.SamplingParams) -> pb.StopOptions:
    return pb.StopOptions(
        max_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else None,
        stop_strings=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_new_tokens,
    )


def _seed(params: sgl.SamplingParams) -> int | None:
    """The contract has no field for it; None: the gateway draws one."""
    field = "sampling_params.custom_params"
    given = params.custom_params.fields
    others = sorted(set(given) - {"seed"})
    if others:
        raise _refusal(f"{field}.{others[0][:40]}", "is not known", "only seed is allowed there")
    if "seed" not in given:
        return None
    seed = given["seed"].number_value
    if not (given["seed"].HasField("number_value") and seed.is_integer() and 0 <= seed <= _MAX_SEED):
        raise _refusal(f"{field}.seed", "is none", f"integers from 0 to {_MAX_SEED} are allowed")
    return int(seed)


def _refuse_unsupported(request: sgl.GenerateRequest) -> None:
    given = {descriptor.name for descriptor, _ in request.ListFields()}
    for field, words in _REFUSED.items():
        if field in given:
            raise _unsupported(field, f"is not supported: {words}; leave it out")
    if request.logprob_start_len not in (0, -1):
        raise _unsupported(
            "logprob_start_len",
            f"is {request.logprob_start_len}; only the output has log-probabilities, which 0 and -1 say",
        )
    if request.top_logprobs_num:
        raise _unsupported(
            "top_logprobs_num",
            f"is {request.top_logprobs_num}; only chosen tokens have a log-probability, so 0 is allowed",
        )
    if request.data_parallel_rank:
        raise _unsupported(
            "data_parallel_rank", f"is {request.data_parallel_rank}; the mesh is one rank to a router: 0"
        )


def _restate(text: str) -> str:
    for ours, theirs in _FIELD_NAMES.items():
        text = text.replace(ours, theirs)
    return _SAMPLING.sub("sampling_params.", text)


def _unsupported(field: str, words: str) -> MeshError:
    return InvalidArgument(f"{field} {words}", field=field, reason="UNSUPPORTED_VALUE")


def _refusal(field: str, fact: str, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {fact}; {allowed}", field=field)
