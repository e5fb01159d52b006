"""Traces: Mooncake's form, the plain form, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshkit.errors import InvalidArgument
from meshkit.load import ChatTurn, LoadRequest, read_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def line(timestamp: int, length: int, hash_ids: list[int]) -> str:
    content = {"timestamp": timestamp, "input_length": length, "output_length": 7, "hash_ids": hash_ids}
    return json.dumps(content) + "\n"


def test_equal_blocks_are_equal_tokens_and_others_are_not(trace: Path) -> None:
    trace.write_text(line(0, 1100, [1, 2, 3]) + line(1500, 1024, [1, 2]) + line(2000, 513, [1, 4]))
    first, second, third = read_trace(trace, vocab_size=1 << 20)
    assert first.token_ids is not None
    assert second.token_ids is not None
    assert third.token_ids is not None
    assert [len(each.token_ids or ()) for each in (first, second, third)] == [1100, 1024, 513]
    assert first.token_ids[:1024] == second.token_ids
    assert third.token_ids[:512] == first.token_ids[:512]
    assert third.token_ids[512] != first.token_ids[512]
    assert first.token_ids[:512] != first.token_ids[512:1024]
    assert [each.at_s for each in (first, second, third)] == [0, 1.5, 2]
    assert {each.max_tokens for each in (first, second, third)} == {7}


def test_the_same_seed_gives_the_same_tokens(trace: Path) -> None:
    trace.write_text(line(0, 600, [1, 2]))
    assert read_trace(trace, vocab_size=99, seed=3) == read_trace(trace, vocab_size=99, seed=3)
    assert read_trace(trace, vocab_size=99, seed=3) != read_trace(trace, vocab_size=99, seed=4)


def test_tokens_that_no_block_names_are_the_requests_own(trace: Path) -> None:
    trace.write_text(line(0, 600, [1]) + line(0, 600, [1]) + line(0, 100, [1, 2, 3]))
    first, second, third = (each.token_ids or () for each in read_trace(trace, vocab_size=1 << 20))
    assert len(first) == len(second) == 600
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]
    assert third == first[:100]


def test_prompts_may_stand_in_the_file_in_any_form(trace: Path) -> None:
    trace.write_text(
        '{"prompt": "hello", "max_tokens": 3}\n\n'
        '{"prompt": [1, 2], "max_tokens": 4, "at": 0.5, "session": "s"}\n'
        '{"prompt": [{"role": "user", "content": "hi"}], "max_tokens": 5, "origin": "elsewhere"}\n'
    )
    assert read_trace(trace) == [
        LoadRequest(3, text="hello"),
        LoadRequest(4, token_ids=(1, 2), at_s=0.5, session="s"),
        LoadRequest(5, messages=(ChatTurn("user", "hi"),)),
    ]
    assert len(read_trace(trace, requests=2)) == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"prompt": "a"}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens"),
        ('{"prompt": "", "max_tokens": 1}', "prompt"),
        ('{"prompt": [], "max_tokens": 1}', "prompt"),
        ('{"prompt": [-1], "max_tokens": 1}', "prompt"),
        ('{"prompt": "a", "max_tokens": 1, "at": -1}', "at"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}', "input_length"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["x"]}', "hash_ids"),
    ],
)
def test_a_bad_line_is_named(trace: Path, bad: str, says: str) -> None:
    trace.write_text('{"prompt": "fine", "max_tokens": 3}\n' + bad + "\n")
    with pytest.raises(InvalidArgument, match="line 2") as refused:
        read_trace(trace, vocab_size=9)
    assert says in refused.value.message
    assert refused.value.field == "--dataset-path"


def test_blocks_want_a_vocabulary(trace: Path) -> None:
    trace.write_text(line(0, 1, [1]))
    with pytest.raises(InvalidArgument, match="--vocab-size"):
        read_trace(trace)


def test_a_file_that_is_missing_or_empty_is_refused(trace: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(trace)
    trace.write_text("\n")
    with pytest.raises(InvalidArgument, match="holds no request"):
        read_trace(trace)
    with pytest.raises(InvalidArgument, match="requests is 0"):
        read_trace(trace, requests=0)
