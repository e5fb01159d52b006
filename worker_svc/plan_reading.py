"""Turns the messages of a step plan into the runner's arrays and settings, refusing values out of range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chipmesh.device.v1alpha1.execution_pb2 import AdmittedRequest
from chipmesh.device.v1alpha1.sampling_pb2 import SamplingParameters
from meshkit.constraints.form import read_constraint
from meshkit.errors import InvalidArgument
from plugins.sdk.runner import IntArray, SamplingSettings, SlotAdmission


def read_ids(values: Sequence[int], *, limit: int, field: str) -> IntArray:
    """`values` as int32, shape [n].

    Raises:
        InvalidArgument: a value is not in [0, limit); `field` is named.
    """
    ids: npt.NDArray[np.uint32] = np.fromiter(values, dtype=np.uint32, count=len(values))
    if ids.size and int(ids.max()) >= limit:
        raise InvalidArgument(f"{field} holds {int(ids.max())}; the limit is {limit - 1}", field=field)
    return ids.astype(np.int32)


def read_admission(request: AdmittedRequest, *, vocab_size: int, field: str) -> SlotAdmission:
    """The runner's form of an admitted request.

    Raises:
        InvalidArgument: sampling parameters are missing or out of range; the field is named.
    """
    if not request.HasField("sampling"):
        raise InvalidArgument(
            f"{field}.sampling is missing; it holds effective parameters", field=f"{field}.sampling"
        )
    sampling = read_sampling(request.sampling, vocab_size=vocab_size, field=f"{field}.sampling")
    history = sampling.needs_history
    output = history or sampling.constraint is not None
    if sampling.constraint is not None and len(request.output_token_ids) != request.output_count:
        raise InvalidArgument(
            f"{field}.output_token_ids has {len(request.output_token_ids)} ids; its constraint needs all "
            f"{request.output_count} of output_count",
            field=f"{field}.output_token_ids",
        )
    return SlotAdmission(
        slot=request.slot,
        sampling=sampling,
        output_count=request.output_count,
        cached_tokens=request.cached_tokens,
        prompt_token_ids=_history(request.penalty_prompt_token_ids, vocab_size, field) if history else (),
        output_token_ids=_history(request.output_token_ids, vocab_size, field) if output else (),
    )


def _history(token_ids: Sequence[int], vocab_size: int, field: str) -> Sequence[int]:
    checked: list[int] = read_ids(token_ids, limit=vocab_size, field=f"{field}.token_ids").tolist()
    return checked


def read_sampling(parameters: SamplingParameters, *, vocab_size: int, field: str) -> SamplingSettings:
    """The runner's form of sampling parameters.

    Raises:
        InvalidArgument: a value is out of the range that sampling.proto states; the field is named.
    """
    settings = SamplingSettings(
        temperature=parameters.temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        min_p=parameters.min_p,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        seed=parameters.seed,
        choice=parameters.choice,
        logit_bias=dict(parameters.logit_bias),
        logprobs=parameters.logprobs,
        suppressed_token_ids=tuple(parameters.suppressed_token_ids),
        min_tokens=parameters.min_tokens,
        constraint=read_constraint(parameters.constraint),
    )
    _check_ranges(settings, vocab_size=vocab_size, field=field)
    return settings


def _check_ranges(settings: SamplingSettings, *, vocab_size: int, field: str) -> None:
    # Comparisons are written so that NaN fails them.
    ranges = (
        ("temperature", 0 <= settings.temperature <= 100, "[0, 100]"),
        ("top_p", 0 < settings.top_p <= 1, "(0, 1]"),
        ("min_p", 0 <= settings.min_p <= 1, "[0, 1]"),
        ("repetition_penalty", 0 < settings.repetition_penalty <= 10, "(0, 10]"),
        ("presence_penalty", -2 <= settings.presence_penalty <= 2, "[-2, 2]"),
        ("frequency_penalty", -2 <= settings.frequency_penalty <= 2, "[-2, 2]"),
    )
    for name, holds, allowed in ranges:
        if not holds:
            value = getattr(settings, name)
            raise InvalidArgument(
                f"{field}.{name} is {value}; its range is {allowed}", field=f"{field}.{name}"
            )
    for name, tokens in (
        ("logit_bias", settings.logit_bias),
        ("suppressed_token_ids", settings.suppressed_token_ids),
    ):
        if any(token >= vocab_size for token in tokens):
            raise InvalidArgument(
                f"{field}.{name} names token {max(tokens)}; the model has {vocab_size} tokens",
                field=f"{field}.{name}",
            )
