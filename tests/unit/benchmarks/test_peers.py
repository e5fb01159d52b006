"""benchmarks.peers: the same prompts for all, work that was not done, ratios, goals, who is left out."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from benchmarks import peers
from benchmarks.peer_servers import LlamaServer, PeerModel
from benchmarks.peers import PeerFailed, Workload
from meshkit.load import LoadRequest, Received, Sample, Usage
from meshkit.load.targets import ServedModel
from meshkit.modelstore import ModelFolder

TEXT = "the cat sat on the mat and the cat ate the rat that sat on the other mat at noon 1234 ... ?!"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT] * 50, trainer)
    return made


class EchoTarget:
    """A server in this process that answers each prompt with as many tokens as were asked for."""

    def __init__(self, *, extra_prompt_tokens: int = 0, missing_tokens: int = 0) -> None:
        self.seen: list[LoadRequest] = []
        self._extra, self._missing = extra_prompt_tokens, missing_tokens

    async def choose_model(self) -> ServedModel:
        return ServedModel("echo")

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Received, None]:
        self.seen.append(request)
        prompt = len(request.token_ids) if request.token_ids else len((request.text or "").split())
        tokens = request.max_tokens - self._missing
        for _ in range(tokens):
            yield Received(1, None, " a", None)
        yield Received(0, None, "", Usage(prompt + self._extra, tokens))


def figures(rate: float, ttft_ms: float, tpot_ms: float = 1.0) -> dict[str, Any]:
    return {"output_tokens_per_s": rate, "ttft_ms": {"p50": ttft_ms}, "tpot_ms": {"p50": tpot_ms}}


def test_prompts_of_words_are_the_same_tokens_as_text(tokenizer: Tokenizer) -> None:
    words = peers.word_ids(tokenizer)
    assert len(words) > 5
    requests = peers.draw_requests(words, count=50, prompt_tokens=20, output_tokens=3, seed=1)
    texts = peers.as_text(requests, tokenizer)
    for request, text in zip(requests, texts, strict=True):
        assert text.token_ids is None
        assert text.text is not None
        assert tuple(tokenizer.encode(text.text).ids) == request.token_ids
        assert text.max_tokens == 3


@pytest.mark.parametrize("text", ["the", " ", " 12", " a1", " été", "  two", " don't", " \n"])
def test_what_could_melt_into_its_neighbours_is_no_word(text: str) -> None:
    assert not peers.is_word(text)


def test_the_same_seed_draws_the_same_prompts_and_another_one_others() -> None:
    def draw(seed: int) -> list[LoadRequest]:
        return peers.draw_requests(range(500), count=4, prompt_tokens=9, output_tokens=1, seed=seed)

    assert draw(1) == draw(1)
    assert not {each.token_ids for each in draw(1)} & {each.token_ids for each in draw(2)}


async def test_each_load_has_five_requests_a_client_and_a_warm_up_that_is_not_counted(
    tokenizer: Tokenizer,
) -> None:
    target = EchoTarget()
    workload = Workload((1, 4), prompt_tokens=6, output_tokens=20)
    words = peers.word_ids(tokenizer)
    measured = await peers.measure_loads(target, workload, words, text_by=None, round_number=0)
    assert {name: told["requests"] for name, told in measured.items()} == {"1": 5, "4": 20}
    warm_ups = [request for request in target.seen if request.max_tokens == peers.WARM_UP_TOKENS]
    assert len(warm_ups) == 1 + 4
    counted = [request for request in target.seen if request.max_tokens == 20]
    assert not {each.token_ids for each in warm_ups} & {each.token_ids for each in counted}


async def test_a_peer_that_takes_text_only_gets_what_the_others_get(tokenizer: Tokenizer) -> None:
    by_ids, by_text = EchoTarget(), EchoTarget()
    workload = Workload((2,), prompt_tokens=6, output_tokens=2)
    words = peers.word_ids(tokenizer)
    await peers.measure_loads(by_ids, workload, words, text_by=None, round_number=3)
    await peers.measure_loads(by_text, workload, words, text_by=tokenizer, round_number=3)
    sent = [tuple(tokenizer.encode(request.text or "").ids) for request in by_text.seen]
    assert sorted(sent) == sorted(request.token_ids or () for request in by_ids.seen)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (EchoTarget(extra_prompt_tokens=1), "35 prompt tokens in 5 requests of 6 each"),
        (EchoTarget(missing_tokens=1), "5 of 5 answers ended early"),
    ],
)
async def test_a_peer_that_does_other_work_has_no_figures(target: EchoTarget, words: str) -> None:
    workload = Workload((1,), prompt_tokens=6, output_tokens=20)
    with pytest.raises(PeerFailed, match=words):
        await peers.measure_loads(target, workload, range(50), text_by=None, round_number=0)


def test_a_failed_request_has_no_figures() -> None:
    lost = Sample(4, sent_s=1.0, ended_s=2.0, error="UNAVAILABLE", error_message="gone")
    with pytest.raises(PeerFailed, match=r"1 of 1 requests failed.*UNAVAILABLE"):
        peers.check_figures([lost], prompt_tokens=3)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    ours = [{"8": figures(100, 10)}, {"8": figures(10, 10)}, {"8": figures(60, 30)}]
    theirs = [{"8": figures(50, 40)}, {"8": figures(10, 20)}, {"8": figures(20, 40)}]
    # Rates: 2, 1 and 3 (of the medians it would be 3); TTFT: 0.25, 0.5 and 0.75.
    assert peers.compare(ours, theirs) == {"8": {"output_tokens_per_s": 2.0, "ttft_p50": 0.5}}


def test_tokens_must_reach_a_goal_and_first_tokens_must_not_pass_it() -> None:
    ratios = {
        "llama.cpp": {
            "1": {"output_tokens_per_s": 1.3, "ttft_p50": 9.0},
            "8": {"output_tokens_per_s": 1.99, "ttft_p50": 0.5},
            "16": {"output_tokens_per_s": 0.1, "ttft_p50": 9.0},
            "32": {"output_tokens_per_s": 2.5, "ttft_p50": 0.51},
        },
        "transformers": {"1": {"output_tokens_per_s": 0.1, "ttft_p50": 9.0}},
    }
    assert peers.judge(ratios) == {
        "llama.cpp": {
            "1 output_tokens_per_s": True,
            "8 output_tokens_per_s": False,
            "8 ttft_p50": True,
            "32 output_tokens_per_s": True,
            "32 ttft_p50": False,
        }
    }


def test_rounds_are_summarised_by_their_median_and_all_are_kept() -> None:
    rounds = [{"1": figures(3, 30, 5)}, {"1": figures(1, 10, 4)}, {"1": figures(2, 50, 9)}]
    told = peers.summarise_rounds(rounds)["1"]
    assert (told["output_tokens_per_s"], told["ttft_p50_ms"], told["tpot_p50_ms"]) == (2, 30, 5)
    assert told["rounds"] == [each["1"] for each in rounds]


def test_every_other_round_goes_backwards() -> None:
    assert [peers.turn_order(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_peers_that_cannot_be_had_are_skipped_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaServer, "default_folder", tmp_path / "empty")
    source = ModelFolder("m", tmp_path, {}, tmp_path / "tokenizer.json", {}, None, "1", 128, 256, ())
    model = PeerModel(tmp_path / "m.gguf", tmp_path / "m", source)
    servers, skipped = peers.find_peers(model, ["llama.cpp", "sglang"], install=False)
    assert servers == {}
    assert "--install" in skipped["llama.cpp"]
    assert str(tmp_path / "empty") in skipped["llama.cpp"]
    assert "SGLang" in skipped["sglang"]


def test_with_install_a_missing_peer_is_installed_and_a_failure_is_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[Path] = []

    def install(folder: Path) -> None:
        installed.append(folder)
        if len(installed) > 1:
            raise subprocess.CalledProcessError(1, ["cmake"])
        program = LlamaServer(model).program
        program.parent.mkdir(parents=True)
        program.touch()

    source = ModelFolder("m", tmp_path, {}, tmp_path / "tokenizer.json", {}, None, "1", 128, 256, ())
    model = PeerModel(tmp_path / "m.gguf", tmp_path / "m", source)
    monkeypatch.setattr(LlamaServer, "default_folder", tmp_path / "first")
    monkeypatch.setattr(LlamaServer, "install", staticmethod(install))
    servers, skipped = peers.find_peers(model, ["llama.cpp"], install=True)
    assert list(servers) == ["llama.cpp"]
    assert (skipped, installed) == ({}, [tmp_path / "first"])
    assert peers.find_peers(model, ["llama.cpp"], install=True)[1] == {}
    assert len(installed) == 1  # What is there is not fetched again.
    monkeypatch.setattr(LlamaServer, "default_folder", tmp_path / "second")
    servers, skipped = peers.find_peers(model, ["llama.cpp"], install=True)
    assert servers == {}
    assert "installation failed" in skipped["llama.cpp"]


def test_the_machine_s_busy_time_is_all_that_is_not_idle() -> None:
    text = "cpu  100 20 30 400 50 6 7 8 90 0\ncpu0 1 2 3 4\n"
    # Guests' time (the last two) is in the user's already.
    assert peers.read_cpu_times(text) == (171, 450)
    assert 0 <= peers.busy_share(0.02) <= 1


def test_the_table_names_goals_and_who_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = [{"1": figures(130, 5)}], [{"1": figures(100, 10)}]
    ratios = {"llama.cpp": peers.compare(ours, theirs)}
    peers.print_table({
        "systems": {
            "chipmesh": peers.summarise_rounds(ours),
            "llama.cpp": peers.summarise_rounds(theirs),
        },
        "ratios": ratios,
        "holds": peers.judge(ratios),
        "skipped": {"vllm": "no vllm at /nowhere"},
    })  # fmt: skip
    shown = capsys.readouterr().out
    assert "1.30    0.50" in shown
    assert "1 output_tokens_per_s: holds" in shown
    assert "vllm: skipped: no vllm at /nowhere" in shown
