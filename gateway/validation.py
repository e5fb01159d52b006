"""Requests checked field by field and completed with defaults: pure, and every error names its field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.generation_spec import GenerationSpec, Sampling, Scheduling, StopConditions
from gateway.models import ServedModel
from meshkit.constraints.form import GRAMMAR, Constraint
from meshkit.errors import FailedPrecondition, InvalidArgument

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 100.0
MAX_CONSTRAINT_BYTES = 256 * 1024
MAX_PRIORITY = 1000
MAX_KEY_CHARS = 256
RESERVED_SALT_PREFIX = "chipmesh-key:"
"""Of the cache salts that keys get from the gateway: no client may put itself into another's cache."""


@dataclass(frozen=True)
class _Range:
    """A closed range of floats, open at its low end where `above_low`, and what an absent field means."""

    low: float
    high: float
    default: float
    above_low: bool = False

    def holds(self, value: float) -> bool:
        """NaN and infinities are outside of every range."""
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above_low else 'from'} {self.low:g} to {self.high:g}"


_RANGES = {
    "temperature": _Range(0, 100, default=1.0),
    "top_p": _Range(0, 1, default=1.0, above_low=True),
    "min_p": _Range(0, 1, default=0.0),
    "repetition_penalty": _Range(0, 10, default=1.0, above_low=True),
    "presence_penalty": _Range(-2, 2, default=0.0),
    "frequency_penalty": _Range(-2, 2, default=0.0),
}


@dataclass(frozen=True)
class Options:
    """All of a request but its prompt and the output that it brings.

    max_tokens: None where the client set none. seed_is_drawn: the client set no seed.
    """

    sampling: Sampling
    stop: StopConditions
    max_tokens: int | None
    logprobs: bool
    scheduling: Scheduling
    seed_is_drawn: bool


def check_request_id(request_id: str) -> None:
    """A client's own id.

    Raises:
        InvalidArgument: it is too long or holds something that cannot be printed.
    """
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise _refusal(
            "request_id", f"has {len(request_id)} characters",
            f"1 to {MAX_REQUEST_ID_CHARS} are allowed; shorten it or leave it empty",
        )  # fmt: skip
    if not request_id.isprintable():
        raise _refusal(
            "request_id", f"is {request_id!r}",
            f"1 to {MAX_REQUEST_ID_CHARS} printable characters are allowed; or leave it empty",
        )  # fmt: skip


def read_options(
    request: pb.GenerateRequest,
    model: ServedModel,
    *,
    draw_seed: Callable[[], int],
    max_resume_window_s: float,
) -> Options:
    """Check everything but the prompt, and fill in what was left out; cheap enough for the event loop.

    draw_seed: called where the request has no seed.

    Raises:
        InvalidArgument: names the field, its value and what is allowed.
        FailedPrecondition: stop strings for a model without text.
    """
    max_tokens = _read_max_tokens(request.stop)
    options = Options(
        sampling=replace(
            _read_sampling(request.sampling, model, draw_seed), constraint=_read_constraint(request.sampling)
        ),
        stop=_read_stop(request.stop, model),
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        scheduling=_read_scheduling(request.scheduling, max_resume_window_s),
        seed_is_drawn=not request.sampling.HasField("seed"),
    )
    _check_given(request.output_token_ids, options, model)
    check_constraint(options.sampling.constraint, options.stop, model)
    return options


def check_constraint(constraint: Constraint | None, stop: StopConditions, model: ServedModel) -> None:
    """What can be said about a constraint without compiling it.

    Raises:
        InvalidArgument: it is empty or too large, or the output of a given form could not end.
        FailedPrecondition: the model has no text.
    """
    if constraint is None:
        return
    if model.text is None:
        raise FailedPrecondition(
            f"sampling.constraint: model {model.name!r} has no tokenizer.json, so what its tokens say is not "
            "known; leave the constraint out",
            field="sampling.constraint",
            reason="MODEL_HAS_NO_TOKENIZER",
        )
    field = f"sampling.constraint.{constraint.kind}"
    if not constraint.text:
        raise _refusal(field, "is empty", "leave sampling.constraint out for an output of any form")
    size_bytes = len(constraint.text.encode(errors="surrogatepass"))
    if size_bytes > MAX_CONSTRAINT_BYTES:
        raise _refusal(field, f"has {size_bytes} bytes", f"at most {MAX_CONSTRAINT_BYTES} are allowed")
    if stop.ignore_eos:
        raise _refusal(
            "stop.ignore_eos",
            "is true, and sampling.constraint is set",
            "an output of a given form ends by an end token; leave one of the two out",
        )


def check_prompt_form(prompt: pb.Prompt, *, max_bytes: int) -> None:
    """What can be said about a prompt before it is tokenised.

    Raises:
        InvalidArgument: it is empty or larger than `max_bytes`.
    """
    form = prompt.WhichOneof("form")
    if form is None:
        raise _refusal("prompt", "is empty", "set one of text, chat and tokens")
    if form == "text" and not prompt.text:
        raise _refusal("prompt.text", "is empty", "at least one character is needed")
    if form == "chat" and not prompt.chat.messages:
        raise _refusal("prompt.chat.messages", "is empty", "at least one message is needed")
    if form != "tokens":
        check_size(prompt.ByteSize(), field=f"prompt.{form}", max_bytes=max_bytes)


def check_size(size_bytes: int, *, field: str, max_bytes: int) -> None:
    """Raises InvalidArgument for a prompt of more than `max_bytes`."""
    if size_bytes > max_bytes:
        raise _refusal(field, f"has {size_bytes} bytes", f"at most {max_bytes} are allowed; shorten it")


def read_token_prompt(token_ids: Sequence[int], model: ServedModel) -> Sequence[int]:
    """A prompt that came as token ids.

    Raises:
        InvalidArgument: it is empty, too long, or holds an id outside of the vocabulary.
    """
    field = "prompt.tokens.token_ids"
    if not token_ids:
        raise _refusal(field, "is empty", "at least one token id is needed")
    _check_length(token_ids, model, field=field)  # Before the scan: a refusal should cost little.
    _check_ids(token_ids, model, field=field)
    return token_ids


def complete(
    options: Options,
    model: ServedModel,
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    field: str,
    owner: str = "",
    choice: int = 0,
) -> GenerationSpec:
    """The whole request, once the prompt's tokens are known. field: where the prompt came from, for errors.
    owner: name of the key that it belongs to. choice: its index among those of one request.

    max_tokens is clipped to what the context leaves.

    Raises:
        InvalidArgument: the prompt leaves no room in the context, or min_tokens exceeds max_tokens.
    """
    if not prompt_token_ids:
        raise _refusal(field, "has no tokens", "at least one is needed")
    _check_length(prompt_token_ids, model, field=field)
    room = model.context_tokens - len(prompt_token_ids)
    max_tokens = room if options.max_tokens is None else min(options.max_tokens, room)
    if options.stop.min_tokens > max_tokens:
        raise _refusal(
            "stop.min_tokens", f"is {options.stop.min_tokens}",
            f"at most {max_tokens} tokens can be made here (stop.max_tokens, or what the context of "
            f"{model.context_tokens} leaves after a prompt of {len(prompt_token_ids)})",
        )  # fmt: skip
    model_end = () if options.stop.ignore_eos else model.eos_token_ids
    return GenerationSpec(
        request_id=request_id,
        model=model.name,
        prompt_token_ids=prompt_token_ids,
        sampling=options.sampling,
        stop=replace(options.stop, max_tokens=max_tokens),
        end_token_ids=tuple(dict.fromkeys((*model_end, *options.stop.stop_token_ids))),
        logprobs=options.logprobs,
        scheduling=options.scheduling,
        seed_is_drawn=options.seed_is_drawn,
        owner=owner,
        choice=choice,
    )


def _check_given(output_token_ids: Sequence[int], options: Options, model: ServedModel) -> None:
    """Output that the client brings: drawn on with another seed, it would be no one generation's."""
    _check_ids(output_token_ids, model, field="output_token_ids")
    if output_token_ids and options.seed_is_drawn and options.sampling.temperature > 0:
        raise InvalidArgument(
            f"sampling.seed is missing, and the {len(output_token_ids)} output_token_ids were drawn with "
            "it; send sampling as accepted.effective_sampling has it (temperature 0 needs no seed)",
            field="sampling.seed",
            reason="SEED_MISSING",
        )


def _read_scheduling(given: pb.SchedulingOptions, max_resume_window_s: float) -> Scheduling:
    if abs(given.priority) > MAX_PRIORITY:
        raise _refusal(
            "scheduling.priority",
            f"is {given.priority}",
            f"from {-MAX_PRIORITY} to {MAX_PRIORITY} are allowed",
        )
    for name in ("cache_salt", "session_key"):
        text: str = getattr(given, name)
        if len(text) > MAX_KEY_CHARS:
            raise _refusal(
                f"scheduling.{name}", f"has {len(text)} characters",
                f"at most {MAX_KEY_CHARS} are allowed; send a hash of it",
            )  # fmt: skip
    if given.cache_salt.startswith(RESERVED_SALT_PREFIX):
        raise _refusal(
            "scheduling.cache_salt", f"begins with {RESERVED_SALT_PREFIX!r}",
            "that is reserved; choose another one",
        )  # fmt: skip
    window_s = given.resume_window_ms / 1000 if given.HasField("resume_window_ms") else None
    if window_s is not None and window_s > max_resume_window_s:
        raise _refusal(
            "scheduling.resume_window_ms", f"is {given.resume_window_ms}",
            f"from 0 to {int(max_resume_window_s * 1000)} are allowed here",
        )  # fmt: skip
    return Scheduling(given.priority, given.cache_salt, given.session_key, window_s)


def _read_sampling(given: pb.SamplingOptions, model: ServedModel, draw_seed: Callable[[], int]) -> Sampling:
    values: dict[str, Any] = {name: _read_float(given, name) for name in _RANGES}
    if given.top_k < -1:
        raise _refusal("sampling.top_k", f"is {given.top_k}", "from 1 up, or 0 or -1 for all, are allowed")
    return Sampling(
        top_k=max(given.top_k, 0),
        seed=given.seed if given.HasField("seed") else draw_seed(),
        logit_bias=_read_logit_bias(given, model),
        **values,
    )


def _read_constraint(given: pb.SamplingOptions) -> Constraint | None:
    if not given.HasField("constraint"):
        return None
    message = given.constraint
    kind = message.WhichOneof("form")
    if kind is None:
        raise _refusal("sampling.constraint", "is empty", "set one of json_schema, regex, grammar and choice")
    if kind == "choice":
        return choice_constraint(message.choice.texts, field="sampling.constraint.choice.texts")
    return Constraint(kind, getattr(message, kind))


def choice_constraint(texts: Sequence[str], *, field: str) -> Constraint:
    """The form of an output that is one of `texts`.

    Raises:
        InvalidArgument: there are none, or one of them is empty.
    """
    if not texts:
        raise _refusal(field, "is empty", "at least one text is needed")
    for index, text in enumerate(texts):
        if not text:
            raise _refusal(f"{field}[{index}]", "is empty", "each text needs at least one character")
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return Constraint(GRAMMAR, f"start: {alternatives}\n")


def _read_float(given: pb.SamplingOptions, name: str) -> float:
    allowed = _RANGES[name]
    if not given.HasField(name):  # type: ignore[arg-type]  # the stubs list the names as literals
        return allowed.default
    value: float = getattr(given, name)
    if not allowed.holds(value):
        raise _refusal(f"sampling.{name}", f"is {value:g}", f"{allowed} is allowed")
    return value


def _read_logit_bias(given: pb.SamplingOptions, model: ServedModel) -> dict[int, float]:
    bias = dict(given.logit_bias)
    for token_id, value in bias.items():
        if token_id >= model.vocab_size:
            raise _outside_vocabulary(f"sampling.logit_bias[{token_id}]", token_id, model)
        if math.isnan(value) or abs(value) > MAX_LOGIT_BIAS:
            raise _refusal(
                f"sampling.logit_bias[{token_id}]", f"is {value:g}",
                f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g} is allowed",
            )  # fmt: skip
    return bias


def _read_max_tokens(given: pb.StopOptions) -> int | None:
    if not given.HasField("max_tokens"):
        return None
    if given.max_tokens < 1:
        raise _refusal(
            "stop.max_tokens", f"is {given.max_tokens}",
            "at least 1 is needed; leave it out for all that the context holds",
        )  # fmt: skip
    return given.max_tokens


def _read_stop(given: pb.StopOptions, model: ServedModel) -> StopConditions:
    if given.stop_strings:
        model.require_text("stop.stop_strings")
        _check_stop_strings(given.stop_strings)
    _check_ids(given.stop_token_ids, model, field="stop.stop_token_ids")
    return StopConditions(
        max_tokens=0,  # Known once the prompt is.
        stop_strings=tuple(given.stop_strings),
        stop_token_ids=tuple(dict.fromkeys(given.stop_token_ids)),
        ignore_eos=given.ignore_eos,
        min_tokens=given.min_tokens,
    )


def _check_stop_strings(stop_strings: Sequence[str]) -> None:
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise _refusal(
            "stop.stop_strings", f"has {len(stop_strings)} entries", f"at most {MAX_STOP_STRINGS} are allowed"
        )
    for index, text in enumerate(stop_strings):
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise _refusal(
                f"stop.stop_strings[{index}]", f"has {len(text)} characters",
                f"1 to {MAX_STOP_STRING_CHARS} are allowed",
            )  # fmt: skip


def _check_length(prompt_token_ids: Sequence[int], model: ServedModel, *, field: str) -> None:
    if len(prompt_token_ids) >= model.context_tokens:
        raise InvalidArgument(
            f"{field} has {len(prompt_token_ids)} tokens; at most {model.context_tokens - 1} are allowed, "
            f"since the context of model {model.name!r} is {model.context_tokens} tokens with the output; "
            "shorten it",
            field=field,
            reason="PROMPT_TOO_LONG",
            limit_tokens=model.context_tokens - 1,
        )


def _check_ids(token_ids: Sequence[int], model: ServedModel, *, field: str) -> None:
    if not token_ids:
        return
    # numpy reads a repeated field as memory: 200,000 ids in 0.1 ms, without 200,000 Python objects.
    outside = np.asarray(token_ids, dtype=np.uint32) >= model.vocab_size
    if outside.any():
        index = int(outside.argmax())
        raise _outside_vocabulary(f"{field}[{index}]", token_ids[index], model)


def _outside_vocabulary(field: str, token_id: int, model: ServedModel) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is token id {token_id}; the vocabulary of model {model.name!r} has the ids "
        f"0 to {model.vocab_size - 1}",
        field=field,
        reason="TOKEN_ID_OUT_OF_VOCABULARY",
    )


def _refusal(field: str, fact: str, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {fact}; {allowed}", field=field)
