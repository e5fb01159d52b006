"""The hash runner gives the oracle's tokens, and shows a wrong page at once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from meshkit.errors import InvalidArgument, ResourceExhausted
from plugins.hash.options import HashOptions, read_options
from plugins.hash.oracle import continue_tokens
from plugins.hash.runner import HashRunner
from plugins.sdk.runner import (
    DecodeRows,
    IntArray,
    LoadOptions,
    PrefillRow,
    SamplingSettings,
    SlotAdmission,
    StepBatch,
)

VOCAB = 32_000
PAGE = 4


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def admission(slot: int, *, cached_tokens: int = 0, logprobs: bool = False) -> SlotAdmission:
    sampling = SamplingSettings(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, seed=0, choice=0, logit_bias={}, logprobs=logprobs, suppressed_token_ids=(),
        min_tokens=0,
    )  # fmt: skip
    return SlotAdmission(slot, sampling, 0, cached_tokens, (), ())


@pytest.fixture
def runner() -> HashRunner:
    made = HashRunner(HashOptions())
    made.load(LoadOptions(model_path=""), lambda _stage, _share: None)
    made.allocate_kv_cache(page_count=32, page_size=PAGE, max_slots=8)
    return made


def prefill(runner: HashRunner, slot: int, pages: IntArray, tokens: Sequence[int], *, start: int = 0) -> int:
    row = PrefillRow(slot, start, ids(*tokens), pages, samples=True)
    output = runner.run_step(StepBatch(decode=None, prefill=[row]))
    return int(output.token_ids[0])


def decode(runner: HashRunner, slots: IntArray, positions: IntArray, table: IntArray) -> list[int]:
    output = runner.run_step(StepBatch(decode=DecodeRows(slots, positions, table), prefill=()))
    assert output.slots.tolist() == slots.tolist()
    tokens: list[int] = output.token_ids.tolist()
    return tokens


def generate(runner: HashRunner, slot: int, pages: IntArray, prompt: Sequence[int], count: int) -> list[int]:
    tokens = [prefill(runner, slot, pages, prompt)]
    for position in range(len(prompt), len(prompt) + count - 1):
        tokens += decode(runner, ids(slot), ids(position), pages[None, :])
    return tokens


def test_the_oracle_is_the_written_definition() -> None:
    # Worked out by hand from CONTRACT: d0 = sha256(name), d1 = sha256(d0 + 4 bytes), token = d1[:8] %
    # vocabulary.
    assert continue_tokens([1, 2, 3], 4, VOCAB) != continue_tokens([1, 2, 4], 4, VOCAB)
    assert continue_tokens([1, 2, 3], 4, VOCAB)[1:] == continue_tokens(
        [1, 2, 3, continue_tokens([1, 2, 3], 1, VOCAB)[0]], 3, VOCAB
    )


def test_tokens_equal_the_oracle_over_many_pages_in_scattered_order(runner: HashRunner) -> None:
    runner.admit(admission(3), ids())
    pages = ids(9, 2, 30, 0, 17, 5)
    assert generate(runner, 3, pages, [5, 6, 7], 18) == continue_tokens([5, 6, 7], 18, VOCAB)


def test_chunks_of_any_size_give_the_same_token(runner: HashRunner) -> None:
    prompt = list(range(100, 111))
    expected = continue_tokens(prompt, 1, VOCAB)[0]
    for slot, cuts in enumerate(([11], [1, 10], [4, 4, 3], [3, 3, 5])):
        pages = ids(*range(slot * 4, slot * 4 + 4))
        runner.admit(admission(slot), ids())
        start, token = 0, -1
        for cut in cuts:
            token = prefill(runner, slot, pages, prompt[start : start + cut], start=start)
            start += cut
        assert token == expected


def test_two_slots_decode_in_one_batch_without_touching_each_other(runner: HashRunner) -> None:
    for slot, first in ((0, 1), (5, 2)):
        runner.admit(admission(slot), ids())
        assert (
            prefill(runner, slot, ids(slot, slot + 1), [first] * 3)
            == continue_tokens([first] * 3, 1, VOCAB)[0]
        )
    got = decode(runner, ids(0, 5), ids(3, 3), np.array([[0, 1], [5, 6]], dtype=np.int32))
    assert got == [continue_tokens([1] * 3, 2, VOCAB)[1], continue_tokens([2] * 3, 2, VOCAB)[1]]


def test_a_cached_prefix_is_read_from_its_pages(runner: HashRunner) -> None:
    prompt = list(range(20, 30))
    runner.admit(admission(0), ids())
    prefill(runner, 0, ids(4, 5, 6), prompt)
    runner.admit(admission(1, cached_tokens=8), ids(4, 5))
    assert prefill(runner, 1, ids(4, 5, 9), prompt[8:], start=8) == continue_tokens(prompt, 1, VOCAB)[0]


def test_a_wrong_page_under_a_cached_prefix_shows_in_the_first_token(runner: HashRunner) -> None:
    prompt = list(range(20, 30))
    runner.admit(admission(0), ids())
    prefill(runner, 0, ids(4, 5, 6), prompt)
    runner.admit(admission(1, cached_tokens=8), ids(5, 4))
    assert prefill(runner, 1, ids(5, 4, 9), prompt[8:], start=8) != continue_tokens(prompt, 1, VOCAB)[0]


def test_an_old_page_overwritten_by_another_request_shows_when_a_page_fills(runner: HashRunner) -> None:
    runner.admit(admission(0), ids())
    pages = ids(0, 1, 2, 3)
    tokens = [prefill(runner, 0, pages, [7] * 5)]
    runner.admit(admission(1), ids())
    prefill(runner, 1, ids(0), [8] * 3)
    for position in range(5, 11):
        tokens += decode(runner, ids(0), ids(position), pages[None, :])
    expected = continue_tokens([7] * 5, 7, VOCAB)
    assert tokens[:3] == expected[:3]
    assert tokens[3:] != expected[3:]


def test_a_wrong_page_while_decoding_shows_in_the_next_token(runner: HashRunner) -> None:
    runner.admit(admission(0), ids())
    prefill(runner, 0, ids(0, 1), [7] * 3)
    wrong = decode(runner, ids(0), ids(3), ids(5, 1)[None, :])
    assert wrong != continue_tokens([7] * 3, 2, VOCAB)[1:]


def test_logprobs_are_zero_where_asked_for_and_absent_elsewhere(runner: HashRunner) -> None:
    row = PrefillRow(0, 0, ids(1), ids(0), samples=True)
    runner.admit(admission(0), ids())
    assert runner.run_step(StepBatch(None, [row])).logprobs is None
    runner.admit(admission(1, logprobs=True), ids())
    output = runner.run_step(StepBatch(None, [PrefillRow(1, 0, ids(1), ids(1), samples=True)]))
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [0.0]
    runner.release(1)
    assert runner.run_step(StepBatch(None, [PrefillRow(0, 1, ids(1), ids(0), samples=True)])).logprobs is None


def test_sizes_come_from_the_config_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 77, "max_position_embeddings": 99}))
    model = HashRunner(HashOptions(eos=(3,))).load(LoadOptions(str(tmp_path)), lambda _stage, _share: None)
    assert (model.vocab_size, model.context_tokens, list(model.eos_token_ids)) == (77, 99, [3])


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": 0}', '{"vocab_size": "many"}'])
def test_a_damaged_config_names_the_model_path(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgument) as refused:
        HashRunner(HashOptions()).load(LoadOptions(str(tmp_path)), lambda _stage, _share: None)
    assert refused.value.field == "model_path"


def test_a_step_takes_the_modelled_time() -> None:
    runner = HashRunner(HashOptions(step_ms=20.0, prefill_tokens_per_s=100.0))
    runner.load(LoadOptions(""), lambda _stage, _share: None)
    runner.allocate_kv_cache(page_count=4, page_size=PAGE, max_slots=1)
    runner.admit(admission(0), ids())
    import time

    start = time.monotonic()
    prefill(runner, 0, ids(0), [1, 2])
    assert time.monotonic() - start >= 0.04


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"steps": "1"}, "backend_options.steps"),
        ({"step_ms": "-1"}, "backend_options.step_ms"),
        ({"step_ms": "nan"}, "backend_options.step_ms"),
        ({"prefill_tokens_per_s": "fast"}, "backend_options.prefill_tokens_per_s"),
        ({"eos": "1,x"}, "backend_options.eos"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_options(options)
    assert refused.value.field == field


def test_options_are_read() -> None:
    assert read_options({"step_ms": "2.5", "eos": "1, 2"}) == HashOptions(step_ms=2.5, eos=(1, 2))


def faulty(tmp_path: Path, **options: str) -> HashRunner:
    made = HashRunner(read_options({"fault_file": str(tmp_path / "fault"), **options}))
    made.load(LoadOptions(model_path=""), lambda _stage, _share: None)
    made.allocate_kv_cache(page_count=32, page_size=PAGE, max_slots=8)
    made.admit(admission(0), ids())
    return made


def test_a_fault_that_a_file_asks_for_happens_once_and_leaves_its_proof(tmp_path: Path) -> None:
    made = faulty(tmp_path)
    (tmp_path / "fault").write_text("out_of_memory")
    with pytest.raises(ResourceExhausted, match="no memory left"):
        prefill(made, 0, ids(0, 1), [1, 2, 3])
    assert [file.name for file in tmp_path.iterdir()] == ["fault.taken"]
    assert prefill(made, 0, ids(0, 1), [1, 2, 3]) == continue_tokens([1, 2, 3], 1, VOCAB)[0]


def test_a_fault_that_nobody_knows_is_refused_with_those_there_are(tmp_path: Path) -> None:
    made = faulty(tmp_path)
    (tmp_path / "fault").write_text("explode")
    with pytest.raises(InvalidArgument, match=r"explode.*hang_step, hang_loop, out_of_memory"):
        prefill(made, 0, ids(0, 1), [1, 2, 3])


def test_a_prompt_that_begins_with_a_deadly_token_kills_the_process_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("plugins.hash.faults.os.kill", lambda pid, number: killed.append((pid, number)))
    made = faulty(tmp_path, die_on_token="7")
    prefill(made, 0, ids(0, 1), [1, 7, 7])
    prefill(made, 0, ids(0, 1), [7], start=3)
    assert killed == []
    prefill(made, 0, ids(0, 1), [7, 1])
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_a_deadly_request_kills_at_its_position_also_when_it_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("plugins.hash.faults.os.kill", lambda pid, number: killed.append(number))
    made = faulty(tmp_path, die_on_token="7:4")
    pages = ids(0, 1, 2)
    prefill(made, 0, pages, [7, 1, 2])
    decode(made, ids(0), ids(3), pages[None, :])
    assert killed == []
    decode(made, ids(0), ids(4), pages[None, :])
    assert len(killed) == 1
    made.admit(admission(0), ids())
    prefill(made, 0, pages, [1, 1, 1, 1, 1, 1])
    assert len(killed) == 1
    made.admit(admission(1), ids())
    prefill(made, 1, pages, [7, 1, 2, 3, 4])
    assert len(killed) == 2


def test_deadly_tokens_are_numbers() -> None:
    assert read_options({"die_on_token": "5, 7:300"}).die_on_token == {5: 0, 7: 300}
    with pytest.raises(InvalidArgument, match="die_on_token"):
        read_options({"die_on_token": "five"})
