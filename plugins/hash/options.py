"""Options of the hash back end, as texts from the worker's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshkit.errors import InvalidArgument

KNOWN = ("step_ms", "prefill_tokens_per_s", "eos", "fault_file", "die_on_token", "memory_file")


@dataclass(frozen=True, slots=True)
class HashOptions:
    """What the hash model is to be like.

    step_ms: least duration of a step, in milliseconds.
    prefill_tokens_per_s: rate at which prompt tokens add to it; 0: they are free.
    eos: token ids that the model says end a generation.
    fault_file: once a file of this path is there, the next step has the fault that it names, once: hang_step,
        hang_loop or out_of_memory. For tests of the mesh.
    memory_file: stands for the chip's memory, which holds one model: a process that loads one while another
        has it gets RESOURCE_EXHAUSTED. For tests of the mesh.
    die_on_token: by a prompt's first token id the position at whose step it kills the process. For tests of
        the mesh.
    """

    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    eos: tuple[int, ...] = ()
    fault_file: str = ""
    die_on_token: Mapping[int, int] = field(default_factory=dict)
    memory_file: str = ""


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
        eos=_token_ids(options, "eos"),
        fault_file=options.get("fault_file", ""),
        die_on_token=_positions(options, "die_on_token"),
        memory_file=options.get("memory_file", ""),
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


def _token_ids(options: Mapping[str, str], name: str) -> tuple[int, ...]:
    text = options.get(name, "")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidArgument(
            f"backend_options.{name} is {text!r}; it must be token ids, separated by commas",
            field=f"backend_options.{name}",
        )
    return tuple(int(part) for part in parts)


def _positions(options: Mapping[str, str], name: str) -> dict[int, int]:
    """TOKEN or TOKEN:POSITION, separated by commas; position 0 where none is given."""
    text = options.get(name, "")
    pairs = [part.strip().partition(":") for part in text.split(",") if part.strip()]
    numbers = [number for token, _, position in pairs for number in (token, position or "0")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise InvalidArgument(
            f"backend_options.{name} is {text!r}; it must be TOKEN or TOKEN:POSITION, separated by commas",
            field=f"backend_options.{name}",
        )
    return {int(token): int(position or "0") for token, _, position in pairs}
