"""`chipmesh bench serve` as a process against real servers, and how it refuses what makes no sense."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli import gateway_channel
from meshkit.errors import InvalidArgument
from meshkit.load import command
from meshkit.load.bench import run_bench
from meshkit.load.settings import BenchSettings, parse_settings
from tests.contract.load.servers import Message, OpenAiManners, Script, serve_grpc, serve_openai

ROOT = Path(__file__).resolve().parents[3]
PAIRS = (Message(0, (1, 2)), Message(0, (3, 4)))
# As the command line wires it.
PROGRAM = """
import sys
from meshkit.cli.app import app, main
from meshkit.load.command import serve
app.command("bench-serve")(serve)
sys.exit(main())
"""


async def start(*words: str, **environment: str) -> asyncio.subprocess.Process:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "protos"))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "bench-serve", *words,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def run(*words: str, **environment: str) -> tuple[int, str, str]:
    process = await start(*words, **environment)
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_a_gateway_is_measured_and_the_report_is_json(tmp_path: Path) -> None:
    script, file = Script(PAIRS, cached_tokens=2), tmp_path / "reports" / "run.json"
    async with serve_grpc(script) as (address, _):
        code, output, errors = await run(
            "--gateway", address, "--max-concurrency", "2", "--random-input-len", "5",
            "--random-output-len", "4", "--goodput", "ttft:60000 e2e:60000", "--json",
            "--output-file", str(file),
            CHIPMESH_API_KEY="a-key",
        )  # fmt: skip
    assert (code, errors) == (0, "")
    report = json.loads(output)
    assert report == json.loads(file.read_text())
    assert (report["model"], report["loop"], report["requests"], report["failed"]) == (
        "scripted",
        "closed",
        10,
        0,
    )
    assert (report["output_tokens"], report["shorter_than_asked"]) == (40, 0)
    assert report["goodput"]["requests"] == 10
    assert report["tokens_per_message"] == 2
    assert "a-key" not in output
    assert {headers["authorization"] for headers in script.headers} == {"Bearer a-key"}
    assert len(script.seen) == 11, "ten and a warm-up"


async def test_a_table_is_printed_and_failures_are_told_by_the_exit_code() -> None:
    manners = OpenAiManners(error_in_stream="out of memory")
    async with serve_openai(Script(PAIRS), manners) as url:
        code, output, _ = await run(
            "--backend", "openai", "--base-url", url, "--num-prompts", "3", "--num-warmups", "0"
        )
    assert code == 1
    assert "3 x INTERNAL/ERROR_IN_STREAM: out of memory" in output
    assert "requests (failed)" in output


@pytest.fixture
def _interrupts_reach_children() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would all that tests start from it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_reach_children")
async def test_interrupting_ends_all_streams() -> None:
    script = Script(PAIRS, hang=True, held_until=4)
    async with serve_grpc(script) as (address, _):
        process = await start(
            "--gateway", address, "--max-concurrency", "4", "--num-warmups", "0", "--request-rate", "inf"
        )
        await asyncio.wait_for(script.hanging.wait(), timeout=30)
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
        await asyncio.wait_for(script.ended.wait(), timeout=10)
    assert process.returncode == 130
    assert (output, errors) == (b"", b"")


async def test_nothing_answers_is_one_line_with_the_address() -> None:
    async with serve_openai(Script()) as url:
        pass
    code, output, errors = await run("--backend", "openai", "--base-url", url)
    assert (code, output) == (1, "")
    assert errors.startswith(f"chipmesh: {url}: ConnectError")
    assert errors.count("\n") == 1


async def test_an_open_loop_says_how_late_it_was() -> None:
    async with serve_grpc(Script(PAIRS)) as (address, _):
        done = await run_bench(
            BenchSettings(
                gateway=address, request_rate=1000.0, num_prompts=20, burstiness=0.5, random_output_len=4
            )
        )
    assert done.report["loop"] == "open"
    assert done.report["late_ms"]["p99"] >= 0
    assert done.report["completed"] == len(done.samples) == 20


@pytest.mark.parametrize("dataset", ["random", "shared-prefix", "multi-turn", "tree"])
async def test_each_workload_sends_as_many_requests_as_asked(dataset: Any) -> None:
    script = Script(PAIRS)
    settings = BenchSettings(
        dataset_name=dataset,
        num_prompts=11,
        random_input_len=3,
        random_output_len=4,
        num_warmups=2,
        gateway="later",
    )
    async with serve_grpc(script) as (address, _):
        done = await run_bench(settings.model_copy(update={"gateway": address}))
    assert (done.report["completed"], len(script.seen)) == (11, 13)
    assert done.report["prompt_tokens"] == sum(len(sent.prompt.tokens.token_ids) for sent in script.seen[2:])


async def test_a_trace_is_replayed_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}\n'
        '{"timestamp": 10, "input_length": 520, "output_length": 4, "hash_ids": [1, 9]}\n'
    )
    script = Script(PAIRS)
    async with serve_grpc(script) as (address, _):
        done = await run_bench(BenchSettings(gateway=address, dataset_name="trace", dataset_path=trace))
    assert done.report["loop"] == "open"
    prompts = [list(sent.prompt.tokens.token_ids) for sent in script.seen[1:]]
    assert [len(prompt) for prompt in prompts] == [600, 520]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:520] != prompts[1][512:]
    assert done.samples[1].sent_s - done.samples[0].sent_s >= 0.009


async def test_token_ids_go_into_a_chat_as_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(500)}, unk_token="w0")
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(words).save(str(file))
    script = Script(PAIRS)
    async with serve_openai(script) as url:
        done = await run_bench(
            BenchSettings(
                backend="openai-chat", base_url=url, dataset_name="multi-turn", turns=2, num_prompts=2,
                random_input_len=3, random_output_len=4, tokenizer=tmp_path,
            )
        )  # fmt: skip
    assert done.report["failed"] == 0
    assert done.report["itl_is_by"] == "message"
    turns = script.seen[-1][1]["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert len(turns[0]["content"].split()) == 3


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"backend": "grpc"}, "--gateway"),
        ({"backend": "grpc", "gateway": "a:1", "base_url": "http://b"}, "--base-url"),
        ({"backend": "grpc", "gateway": "a:1", "extra_body": {"a": 1}}, "--extra-body"),
        ({"backend": "openai"}, "--base-url"),
        ({"backend": "openai-chat", "base_url": "http://b"}, "--tokenizer"),
        ({"gateway": "a:1", "dataset_name": "trace"}, "--dataset-path"),
        ({"gateway": "a:1", "dataset_path": "x"}, "--dataset-path"),
        ({"gateway": "a:1", "num_prompts": 0}, "--num-prompts"),
        ({"gateway": "a:1", "request_rate": float("nan")}, "--request-rate"),
        ({"gateway": "a:1", "max_concurrency": -3}, "--max-concurrency"),
        ({"gateway": "a:1", "backend": "carrier-pigeon"}, "--backend"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_name(flags: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_settings(flags)
    assert refused.value.field == field


async def test_a_vocabulary_that_nobody_tells_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    script, manners = Script(PAIRS), OpenAiManners(tell_vocabulary=False)
    async with serve_openai(script, manners) as url:
        settings = BenchSettings(backend="openai", base_url=url, random_output_len=4, num_prompts=1)
        with pytest.raises(InvalidArgument, match="--vocab-size"):
            await run_bench(settings)
        done = await run_bench(settings.model_copy(update={"vocab_size": 7}))
    assert done.report["failed"] == 0
    assert max(token for _, body in script.seen for token in body["prompt"]) < 7


@pytest.mark.parametrize("words", ["[1]", "{", "7"])
def test_an_extra_body_is_an_object(words: str) -> None:
    with pytest.raises(InvalidArgument, match="--extra-body"):
        command.read_settings(
            {"backend": "grpc", "extra_body": words, "goodput": None, "gateway": "a:1"}, api_key_env=None
        )


def test_a_key_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(InvalidArgument, match="NO_SUCH_KEY is not set"):
        command.read_settings(
            {"backend": "openai", "base_url": "http://a", "extra_body": None, "goodput": None},
            api_key_env="NO_SUCH_KEY",
        )


def test_the_variables_are_those_of_the_command_line() -> None:
    assert command.GATEWAY_KEY_VARIABLE == gateway_channel.API_KEY_VARIABLE
    assert command.AUTHORITY_VARIABLE == gateway_channel.AUTHORITY_VARIABLE


async def test_flags_cost_no_import_of_what_only_a_run_needs() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import meshkit.load.command, sys; print(*sys.modules)",
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    loaded = set(output.decode().split())
    assert "meshkit.load.command" in loaded
    assert not loaded & {"httpx2", "matplotlib", "tokenizers", "rich.progress", "chipmesh", "opentelemetry"}
