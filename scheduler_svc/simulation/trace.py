"""Requests to replay: a JSONL trace in Mooncake's form, or a synthetic one with shared prefixes.

A line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...]}: equal ids
stand for equal blocks of 512 tokens, so requests whose ids begin alike share that prefix. The last block may
be partial.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from meshkit.config import FrozenConfig, load_config
from meshkit.errors import InvalidArgument

BLOCK_TOKENS = 512
_TOKEN_RANGE = 1 << 31


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line. at_s: seconds after the start of the trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


class SyntheticTrace(FrozenConfig):
    """Poisson arrivals; each request takes one of `prefixes` shared prefixes with probability `shared`.

    rate: requests per second. own_tokens, output_tokens: means of exponential lengths of at least 1 token.
    prefix_tokens: a multiple of 512. sha256: of the requests that come out, "" where nobody checks: a trace
    described by numbers is the same for everybody, or is refused.
    """

    requests: PositiveInt
    rate: PositiveFloat
    own_tokens: PositiveInt = 256
    output_tokens: PositiveInt = 32
    prefixes: PositiveInt = 100
    prefix_tokens: PositiveInt = Field(default=BLOCK_TOKENS, multiple_of=BLOCK_TOKENS)
    shared: float = Field(default=0.5, ge=0.0, le=1.0)
    seed: int = 0
    sha256: str = ""

    def checked(self) -> list[TracedRequest]:
        """The requests. Raises InvalidArgument (--trace) where they are not those that `sha256` is of."""
        requests = list(self.generate())
        found = digest(requests)
        if self.sha256 and found != self.sha256:
            raise _wrong(
                f"this Python makes other requests (sha256 {found}) than the trace says ({self.sha256})"
            )
        return requests

    def generate(self) -> Iterator[TracedRequest]:
        """The same requests for the same numbers."""
        draw = random.Random(self.seed)
        now, fresh = 0.0, self.prefixes
        for _ in range(self.requests):
            now += draw.expovariate(self.rate)
            own = 1 + int(draw.expovariate(1 / self.own_tokens))
            blocks: list[int] = []
            if draw.random() < self.shared:
                prefix = draw.randrange(self.prefixes)
                blocks = [prefix * 1000 + part for part in range(self.prefix_tokens // BLOCK_TOKENS)]
            length = len(blocks) * BLOCK_TOKENS + own
            while len(blocks) * BLOCK_TOKENS < length:
                fresh += 1
                blocks.append(fresh * 1000)
            output = 1 + int(draw.expovariate(1 / self.output_tokens))
            yield TracedRequest(now, length, output, tuple(blocks))


def digest(requests: Iterable[TracedRequest]) -> str:
    """SHA-256 over all fields, times to the microsecond."""
    sum_ = hashlib.sha256()
    for each in requests:
        line = (round(each.at_s * 1e6), each.input_tokens, each.output_tokens, *each.block_ids)
        sum_.update(repr(line).encode())
    return sum_.hexdigest()


def read_trace(file: Path) -> list[TracedRequest]:
    """The requests of a trace, by time: JSONL, or `.json` with the numbers of a SyntheticTrace.

    Raises:
        InvalidArgument: (--trace) with the line at fault and what is wrong with it.
    """
    if file.suffix == ".json":
        return _read_synthetic(file)
    requests: list[TracedRequest] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_read_line(line, f"{file}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{file} cannot be read: {error}") from error
    if not requests:
        raise _wrong(f"{file} holds no request")
    return sorted(requests, key=lambda request: request.at_s)


@dataclass
class Prompts:
    """Token ids of blocks: equal ids give equal tokens, other ids other tokens."""

    _blocks: dict[int, array[int]] = field(default_factory=dict)

    def tokens(self, request: TracedRequest) -> array[int]:
        """The prompt's token ids; blocks that the trace does not name are the request's own."""
        prompt = array("I")
        for block in request.block_ids:
            prompt.extend(self._block(block))
            if len(prompt) >= request.input_tokens:
                break
        own = random.Random(f"{request.at_s}/{request.block_ids}")
        while len(prompt) < request.input_tokens:
            prompt.append(own.randrange(_TOKEN_RANGE))
        del prompt[request.input_tokens :]
        return prompt

    def _block(self, block: int) -> array[int]:
        known = self._blocks.get(block)
        if known is None:
            # Far enough apart that two blocks have no token in common at the same place.
            start = block * 2_654_435_761 % _TOKEN_RANGE
            known = array("I", ((start + step) % _TOKEN_RANGE for step in range(BLOCK_TOKENS)))
            self._blocks[block] = known
        return known


def _read_synthetic(file: Path) -> list[TracedRequest]:
    try:
        return load_config(SyntheticTrace, file).checked()
    except InvalidArgument as error:
        if error.field == "--trace":
            raise
        raise _wrong(error.message) from error


def _read_line(line: str, place: str) -> TracedRequest:
    try:
        fields = json.loads(line)
        request = TracedRequest(
            at_s=float(fields["timestamp"]) / 1000,
            input_tokens=int(fields["input_length"]),
            output_tokens=int(fields["output_length"]),
            block_ids=tuple(int(each) for each in fields.get("hash_ids", ())),
        )
    except json.JSONDecodeError as error:
        raise _wrong(f"{place}, column {error.colno}: {error.msg}") from error
    except KeyError as error:
        raise _wrong(f"{place}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise _wrong(f"{place}: {error}") from error
    if request.input_tokens < 1 or request.output_tokens < 1 or request.at_s < 0:
        raise _wrong(f"{place}: lengths must be at least 1 and timestamps at least 0")
    return request


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(f"--trace: {message}", field="--trace")
