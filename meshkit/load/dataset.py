"""The requests that settings describe, and their prompts as text where a tokenizer is named."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from meshkit.errors import InvalidArgument
from meshkit.load.request import ChatTurn, LoadRequest
from meshkit.load.settings import BenchSettings
from meshkit.load.trace import read_trace
from meshkit.load.workloads import multi_turn, random_tokens, shared_prefix, tree_of_thought, tree_size

WARM_UP_SEED = 1_000_003
"""Added to the run's seed, so that a warm-up caches no prefix of the run."""


def make_requests(settings: BenchSettings, *, vocab_size: int | None) -> list[LoadRequest]:
    """The requests of the run.

    vocab_size: as the server says; settings' own goes before it. It reads files, so it may block.

    Raises:
        InvalidArgument: a trace or tokenizer that cannot be read; nobody knows which token ids there are.
    """
    vocab_size = settings.vocab_size or vocab_size
    if settings.dataset_path is not None:
        requests = read_trace(
            settings.dataset_path, vocab_size=vocab_size, seed=settings.seed, requests=settings.num_prompts
        )
    else:
        requests = _generate(settings, count=settings.prompts, seed=settings.seed, vocab_size=vocab_size)
    return _in_form(settings, requests)


def make_warm_up(settings: BenchSettings, *, vocab_size: int | None) -> list[LoadRequest]:
    """`num_warmups` requests like those of the run, with other prompts; beside a trace, a few words."""
    count = settings.num_warmups
    if count == 0:
        return []
    if settings.dataset_path is not None:
        return [LoadRequest(8, text=f"Warm-up number {number}:") for number in range(count)]
    vocab_size = settings.vocab_size or vocab_size
    requests = _generate(settings, count=count, seed=settings.seed + WARM_UP_SEED, vocab_size=vocab_size)
    return _in_form(settings, requests)


def as_text(request: LoadRequest, decode: Callable[[list[int]], str], *, chat: bool) -> LoadRequest:
    """A prompt of token ids as text, or as a user's turn; any other as it is.

    The server may count other tokens in it than there were.
    """
    if request.token_ids is None:
        return request
    text = decode(list(request.token_ids))
    if chat:
        return dataclasses.replace(request, token_ids=None, messages=(ChatTurn("user", text),))
    return dataclasses.replace(request, token_ids=None, text=text)


def _generate(settings: BenchSettings, *, count: int, seed: int, vocab_size: int | None) -> list[LoadRequest]:
    if vocab_size is None:
        raise InvalidArgument(
            f"--vocab-size: dataset {settings.dataset_name} draws token ids, and the server does not say "
            "which there are; give their number",
            field="--vocab-size",
        )
    shape = {"output_tokens": settings.random_output_len, "vocab_size": vocab_size, "seed": seed}
    length = settings.random_input_len
    if settings.dataset_name == "shared-prefix":
        requests = shared_prefix(
            settings.shared_prefix_groups, requests=count, prefix_tokens=settings.shared_prefix_len,
            own_tokens=length, **shape,
        )  # fmt: skip
    elif settings.dataset_name == "multi-turn":
        sessions = -(-count // settings.turns)
        requests = multi_turn(sessions, turns=settings.turns, turn_tokens=length, **shape)
    elif settings.dataset_name == "tree":
        trees = -(-count // tree_size(settings.tree_branches, settings.tree_depth))
        requests = tree_of_thought(
            trees, branches=settings.tree_branches, depth=settings.tree_depth, root_tokens=length,
            thought_tokens=settings.thought_len, **shape,
        )  # fmt: skip
    else:
        requests = random_tokens(count, prompt_tokens=length, **shape)
    return list(itertools.islice(requests, count))


def _in_form(settings: BenchSettings, requests: list[LoadRequest]) -> list[LoadRequest]:
    if settings.tokenizer is not None:
        decode, chat = _load_decoder(settings.tokenizer), settings.backend == "openai-chat"
        requests = [as_text(request, decode, chat=chat) for request in requests]
    _check_form(settings, requests)
    return requests


def _check_form(settings: BenchSettings, requests: Sequence[LoadRequest]) -> None:
    """Refuses before the run what each of its requests would fail by."""
    if settings.backend == "openai-chat" and any(each.token_ids is not None for each in requests):
        raise InvalidArgument(
            "--backend openai-chat takes text, and there are prompts of token ids; give --tokenizer FILE, or "
            "use --backend openai",
            field="--backend",
        )
    if settings.backend == "openai" and any(each.messages is not None for each in requests):
        raise InvalidArgument(
            "--backend openai takes no messages, and the trace has some; use openai-chat", field="--backend"
        )


def _load_decoder(path: Path) -> Callable[[list[int]], str]:
    file = path / "tokenizer.json" if path.is_dir() else path
    # Only where a tokenizer is named: it takes as long to import as all the rest.
    tokenizers = importlib.import_module("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise _unreadable(file, error.strerror) from error
    except ValueError as error:
        raise _unreadable(file, error) from error
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=False))


def _unreadable(file: Path, why: object) -> InvalidArgument:
    return InvalidArgument(
        f"--tokenizer: {file} cannot be used: {why}; name a tokenizer.json", field="--tokenizer"
    )
