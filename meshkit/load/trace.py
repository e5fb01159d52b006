"""Workloads from a file: JSONL, each line in Mooncake's form or with the prompt itself.

Mooncake's: {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [id, ...]}. An id stands
for a block of 512 tokens, the last one perhaps cut; equal ids become equal tokens.
The plain form: {"prompt": P, "max_tokens": m, "at": seconds, "session": id}, where P is a text, a list of
token ids or a list of {"role": ..., "content": ...}; `at` and `session` may be left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from meshkit.errors import InvalidArgument, MeshError
from meshkit.load.request import ChatTurn, LoadRequest

BLOCK_TOKENS = 512


class _Line(BaseModel):
    """Fields of traces that we do not know are somebody else's business."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _MooncakeLine(_Line):
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: PositiveInt
    output_length: PositiveInt
    hash_ids: list[NonNegativeInt]


class _Message(_Line):
    role: str
    content: str


class _PlainLine(_Line):
    prompt: str | list[NonNegativeInt] | list[_Message]
    max_tokens: PositiveInt
    at: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    session: str | None = None


def read_trace(
    path: Path, *, vocab_size: int | None = None, seed: int = 0, requests: int | None = None
) -> list[LoadRequest]:
    """The requests of a trace, at most the first `requests`, each with `at_s` where its line says when.

    vocab_size, seed: Mooncake's blocks become token ids in [0, vocab_size), by seed and id.

    Raises:
        InvalidArgument: the file, or the line and what is wrong with it; or blocks and no vocab_size.
    """
    if requests is not None and requests < 1:
        raise InvalidArgument(f"requests is {requests}; at least 1 is needed", field="requests")
    blocks = _Blocks(vocab_size, seed)
    read: list[LoadRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    read.append(_read_line(line, blocks, where=f"{path}, line {number}"))
                if len(read) == requests:
                    break
    except OSError as error:
        raise InvalidArgument(
            f"--dataset-path: {path} cannot be read: {error.strerror}", field="--dataset-path"
        ) from error
    if not read:
        raise InvalidArgument(f"--dataset-path: {path} holds no request", field="--dataset-path")
    return read


class _Blocks:
    """Token ids by block id; made anew for each use, as a long trace has more than memory should hold."""

    def __init__(self, vocab_size: int | None, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def tokens(self, hash_ids: Sequence[int], length: int, *, own: str) -> tuple[int, ...]:
        """The first `length` tokens of the blocks; `own` is the seed of what no block is named for.

        Raises:
            ValueError: nobody has said what token ids there are.
        """
        if self._vocab_size is None or self._vocab_size < 1:
            raise ValueError("hash_ids become tokens, for which --vocab-size must say what ids there are")
        made: list[int] = []
        for block in hash_ids[: -(-length // BLOCK_TOKENS)]:
            made += self._draw(str(block), BLOCK_TOKENS)
        made += self._draw(own, length - len(made)) if len(made) < length else []
        return tuple(made[:length])

    def _draw(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self._seed}/{name}").choices(range(self._vocab_size or 0), k=count)


def _read_line(line: bytes, blocks: _Blocks, *, where: str) -> LoadRequest:
    try:
        content = orjson.loads(line)
        if isinstance(content, dict) and "hash_ids" in content:
            return _from_mooncake(_MooncakeLine.model_validate(content), blocks, where)
        return _from_plain(_PlainLine.model_validate(content))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        text = f"{'.'.join(map(str, problem['loc'])) or 'the line'}: {problem['msg']}"
    except MeshError as error:
        text = error.message
    except ValueError as error:
        text = str(error)
    raise InvalidArgument(f"--dataset-path: {where}: {text}", field="--dataset-path")


def _from_mooncake(line: _MooncakeLine, blocks: _Blocks, where: str) -> LoadRequest:
    tokens = blocks.tokens(line.hash_ids, line.input_length, own=where)
    return LoadRequest(line.output_length, token_ids=tokens, at_s=line.timestamp / 1e3)


def _from_plain(line: _PlainLine) -> LoadRequest:
    prompt = line.prompt
    form: dict[str, Any]
    if isinstance(prompt, str):
        form = {"text": prompt}
    elif turns := [ChatTurn(each.role, each.content) for each in prompt if isinstance(each, _Message)]:
        form = {"messages": tuple(turns)}
    else:
        form = {"token_ids": tuple(prompt)}
    return LoadRequest(line.max_tokens, at_s=line.at, session=line.session, **form)
