"""Output tokens that a client brings, so that its generation goes on after them at any gateway."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from gateway.generation_spec import Finish, FinishReason, GenerationSpec
from gateway.live_request import LiveRequest
from gateway.output_text import OutputText
from meshkit.errors import AlreadyExists, InvalidArgument

FIELD = "output_token_ids"


def take_in(token_ids: Sequence[int], spec: GenerationSpec, text: OutputText) -> array[int]:
    """Feed `text` as if the tokens had been made here, and return them, four bytes each.

    Takes about 2 us a token: run it in the pool.

    Raises:
        InvalidArgument: more than max_tokens, or a token after the end of the generation.
    """
    if len(token_ids) > spec.stop.max_tokens:
        raise InvalidArgument(
            f"{FIELD} has {len(token_ids)} tokens; at most {spec.stop.max_tokens} can be made here "
            "(stop.max_tokens, or what the context leaves after the prompt); send what came for this request",
            field=FIELD,
        )
    taken = array("I")
    for token_id in token_ids:
        reason = spec.ending_of(taken, matched_stop=text.matched)
        if reason is not None:
            raise _after_the_end(len(taken), reason)
        taken.append(token_id)
        text.add((token_id,))
    return taken


def check_same(asked: GenerationSpec, live: LiveRequest) -> None:
    """Whether a request that comes with the id of `live` asks for the same; scheduling does not count.

    Raises:
        AlreadyExists: it does not, so it is another request and may not see that one's tokens.
    """
    differing = _difference(asked, live.spec)
    if differing is not None:
        raise AlreadyExists(
            f"request_id {asked.request_id!r} belongs to a request here whose {differing} differs; choose "
            "another id or leave it empty, or send the same request again to follow that one",
            field="request_id",
            reason="REQUEST_ID_IN_USE",
            differs=differing,
        )


def check_agrees(token_ids: Sequence[int], live: LiveRequest) -> None:
    """The client's tokens against those that `live` has made.

    Raises:
        InvalidArgument: they differ, or go on after its end; the first such index is named.
    """
    made = live.token_ids[: len(token_ids)]
    given = np.asarray(token_ids, dtype=np.uint32)[: len(made)]
    differing = np.flatnonzero(np.asarray(made, dtype=np.uint32) != given)
    if differing.size:
        index = int(differing[0])
        raise InvalidArgument(
            f"{FIELD}[{index}] is {token_ids[index]}, but token {index} of request "
            f"{live.spec.request_id!r} is {made[index]}; send the tokens that came for it, or use another "
            "request_id",
            field=f"{FIELD}[{index}]",
            reason="OUTPUT_DIFFERS",
            index=index,
        )
    if len(made) < len(token_ids) and live.ended_well:
        raise _after_the_end(len(made), live.end.reason if isinstance(live.end, Finish) else None)


def check_logprobs_from(index: int, live: LiveRequest, *, field: str) -> None:
    """Whether all that a reader from token `index` on is to get is known here.

    Raises:
        InvalidArgument: it lacks the logprobs of tokens that `live` was given rather than made.
    """
    if live.spec.logprobs and index < live.given_count:
        raise InvalidArgument(
            f"{field}: the logprobs of tokens {index} to {live.given_count - 1} are not known here, since "
            f"this request was brought here with them; it can be followed from token {live.given_count} on",
            field=field,
            reason="LOGPROBS_NOT_KNOWN",
        )


def _difference(asked: GenerationSpec, known: GenerationSpec) -> str | None:
    """The first part that differs, by its name in the request."""
    if asked.model != known.model:
        return "model"
    # A prompt of text compares at memory speed: both are repeated fields of the same kind.
    if asked.prompt_token_ids != known.prompt_token_ids:
        return "prompt"
    return _sampling_difference(asked, known) or (
        "stop" if asked.stop != known.stop else "logprobs" if asked.logprobs != known.logprobs else None
    )


def _sampling_difference(asked: GenerationSpec, known: GenerationSpec) -> str | None:
    """A seed that both left to the gateway is the same, and so is any seed where nothing is drawn."""
    ours, theirs = vars(known.sampling), vars(asked.sampling)
    for name, value in ours.items():
        if name != "seed" and theirs[name] != value:
            return f"sampling.{name}"
    same_seed = ours["seed"] == theirs["seed"] or (asked.seed_is_drawn and known.seed_is_drawn)
    return None if same_seed or known.sampling.temperature == 0 else "sampling.seed"


def _after_the_end(count: int, reason: FinishReason | None) -> InvalidArgument:
    why = "" if reason is None else f" ({reason.value})"
    return InvalidArgument(
        f"{FIELD}[{count}] comes after the end of the generation, which is complete with {count} "
        f"tokens{why}; send no more than came for this request",
        field=f"{FIELD}[{count}]",
        reason="OUTPUT_AFTER_END",
        index=count,
    )
