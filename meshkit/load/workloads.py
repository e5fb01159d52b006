"""Workloads as pure functions: numbers and a seed in, the same requests out each time.

Prompts are random token ids from [0, vocab_size), so what two of them share is what was made to be shared.
"""

from __future__ import annotations

import random

from meshkit.errors import InvalidArgument
from meshkit.load.request import LoadRequest

Tokens = tuple[int, ...]


def random_tokens(
    requests: int, *, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int = 0
) -> list[LoadRequest]:
    """Prompts that share nothing.

    Raises:
        InvalidArgument: a number below 1, by field. So for all workloads here.
    """
    _require_positive(
        requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, vocab_size=vocab_size
    )
    draw = random.Random(seed)
    return [
        LoadRequest(output_tokens, token_ids=_draw_tokens(draw, prompt_tokens, vocab_size))
        for _ in range(requests)
    ]


def shared_prefix(
    groups: int,
    *,
    requests: int,
    prefix_tokens: int,
    own_tokens: int,
    output_tokens: int,
    vocab_size: int,
    seed: int = 0,
) -> list[LoadRequest]:
    """`requests` in all, of `groups` prefixes in turn; each has `own_tokens` of its own after its prefix."""
    _require_positive(
        groups=groups, requests=requests, prefix_tokens=prefix_tokens, own_tokens=own_tokens,
        output_tokens=output_tokens, vocab_size=vocab_size,
    )  # fmt: skip
    draw = random.Random(seed)
    prefixes = [_draw_tokens(draw, prefix_tokens, vocab_size) for _ in range(groups)]
    return [
        LoadRequest(
            output_tokens,
            token_ids=prefixes[index % groups] + _draw_tokens(draw, own_tokens, vocab_size),
        )
        for index in range(requests)
    ]


def multi_turn(
    sessions: int,
    *,
    turns: int,
    turn_tokens: int,
    output_tokens: int,
    vocab_size: int,
    system_tokens: int = 0,
    seed: int = 0,
) -> list[LoadRequest]:
    """Conversations: `turns` requests a session, each of `turn_tokens` new tokens after all that was said.

    system_tokens: length of a beginning that all sessions share. The list goes turn by turn over all
    sessions: the first turn of each, then the second of each.
    """
    _require_positive(
        sessions=sessions, turns=turns, turn_tokens=turn_tokens,
        output_tokens=output_tokens, vocab_size=vocab_size,
    )  # fmt: skip
    _require("system_tokens", system_tokens, least=0)
    draw = random.Random(seed)
    system = _draw_tokens(draw, system_tokens, vocab_size)
    return [
        LoadRequest(
            output_tokens,
            token_ids=(system if turn == 0 else ()) + _draw_tokens(draw, turn_tokens, vocab_size),
            session=f"{seed}-{session}",
        )
        for turn in range(turns)
        for session in range(sessions)
    ]


def tree_of_thought(
    trees: int,
    *,
    branches: int,
    depth: int,
    root_tokens: int,
    thought_tokens: int,
    output_tokens: int,
    vocab_size: int,
    seed: int = 0,
) -> list[LoadRequest]:
    """Trees of prompts: a node's prompt is its parent's and `thought_tokens` more; a root has `root_tokens`.

    Each tree has `tree_size(branches, depth)` requests. They go level by level, so that a parent is sent
    before its children. Thoughts are drawn, not taken from answers: the tree is the same for every server.
    """
    _require_positive(
        trees=trees, branches=branches, root_tokens=root_tokens, thought_tokens=thought_tokens,
        output_tokens=output_tokens, vocab_size=vocab_size,
    )  # fmt: skip
    _require("depth", depth, least=0)
    draw = random.Random(seed)
    level = [_draw_tokens(draw, root_tokens, vocab_size) for _ in range(trees)]
    prompts = list(level)
    for _ in range(depth):
        level = [
            parent + _draw_tokens(draw, thought_tokens, vocab_size)
            for parent in level
            for _ in range(branches)
        ]
        prompts += level
    return [LoadRequest(output_tokens, token_ids=prompt) for prompt in prompts]


def tree_size(branches: int, depth: int) -> int:
    """Nodes of one tree, its root included: 1 + branches + ... + branches ** depth."""
    return sum(branches**level for level in range(depth + 1))


def _draw_tokens(draw: random.Random, count: int, vocab_size: int) -> Tokens:
    return tuple(draw.choices(range(vocab_size), k=count))


def _require_positive(**numbers: int) -> None:
    for field, value in numbers.items():
        _require(field, value, least=1)


def _require(field: str, value: int, *, least: int) -> None:
    if value < least:
        raise InvalidArgument(f"{field} is {value}; at least {least} is needed", field=field)
