"""Options of the hash back end, as texts from the worker's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import InvalidArgument

KNOWN = ("step_ms", "prefill_tokens_per_s", "eos")


@dataclass(frozen=True, slots=True)
class HashOptions:
    """What the hash model is to be like.

    step_ms: least duration of a step, in milliseconds.
    prefill_tokens_per_s: rate at which prompt tokens add to it; 0: they are free.
    eos: token ids that the model says end a generation.
    """

    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    eos: tuple[int, ...] = ()


def read_options(options: Mapping[str, str]) -> HashOptions:
    """Read `options`.

    Raises:
        InvalidArgument: an unknown option, or a value that is no number of its range.
    """
    for name in options:
        if name not in KNOWN:
            raise InvalidArgument(
                f"backend_options.{name} is unknown to back end 'hash'; it has {', '.join(KNOWN)}",
                field=f"backend_options.{name}",
            )
    return HashOptions(
        step_ms=_number(options, "step_ms"),
        prefill_tokens_per_s=_number(options, "prefill_tokens_per_s"),
        eos=_token_ids(options.get("eos", "")),
    )


def _number(options: Mapping[str, str], name: str) -> float:
    text = options.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value < math.inf):
        raise InvalidArgument(
            f"backend_options.{name} is {text!r}; it must be a number of at least 0",
            field=f"backend_options.{name}",
        )
    return value


def _token_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidArgument(
            f"backend_options.eos is {text!r}; it must be token ids, separated by commas",
            field="backend_options.eos",
        )
    return tuple(int(part) for part in parts)
