"""`chipmesh tune` on a group that serves: what it changes, for how long, and what stays of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2_grpc
from meshkit.cli import main
from meshkit.cli.tuning import command
from meshkit.cli.tuning.space import DEFAULT, Setting
from meshkit.cli.tuning.taken_group import Ceilings, TakenGroup
from meshkit.cli.up import read_groups
from meshkit.errors import MeshError
from tests.contract.cli.ceilings import CeilingScheduler, Group
from tests.contract.cli.conftest import served
from tests.contract.load.servers import Message, Script, serve_grpc

Score = Callable[[Setting], float]
FAST = ("--rounds", "4", "--budget", "1000", "--gateway", "127.0.0.1:1")


@pytest.fixture
def group() -> Group:
    """Its chunk has a ceiling that is lower than what the replica takes, its batch one that is not."""
    return Group([(512, 16)], ceilings=(128, 64))


@pytest.fixture
def mesh(group: Group) -> Iterator[tuple[CeilingScheduler, str]]:
    scheduler = CeilingScheduler(gpu=group)
    with served(lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(scheduler, server)) as at:
        yield scheduler, at


def report(tokens_per_s: float, *, ttft_ms: float = 100.0, failed: int = 0) -> dict[str, Any]:
    """Of a run, as `describe_samples` makes it."""
    return {
        "output_tokens_per_s": tokens_per_s,
        "ttft_ms": {"p50": ttft_ms},
        "tpot_ms": {"p50": 10.0},
        "goodput": None,
        "requests": 8,
        "failed": failed,
        "errors": {},
    }


def measured_by(monkeypatch: pytest.MonkeyPatch, measure: Callable[[Setting], Any]) -> None:
    """Each setting is applied as ever; the load is `measure`."""

    def make_measure(_request: Any, site: Any, *, on_done: Any) -> Callable[[Setting], Any]:
        def apply_and_measure(setting: Setting) -> Any:
            site.apply(setting)
            return measure(setting)

        return apply_and_measure

    monkeypatch.setattr(command, "make_measure", make_measure)


def larger_is_better(setting: Setting) -> dict[str, Any]:
    chunk = setting.chunked_prefill_size or 128
    batch = setting.max_running_requests or 16
    return report(chunk + batch)


def groups_file(folder: Path) -> Path:
    file = folder / "groups.json"
    file.write_text(json.dumps({"groups": [{"name": "gpu", "devices": "hash:0"}]}), encoding="utf-8")
    return file


def test_taking_a_group_finds_its_ceilings_and_leaves_them(mesh: tuple[CeilingScheduler, str]) -> None:
    scheduler, address = mesh
    taken = TakenGroup(address, "gpu")
    taken.take()
    assert (taken.model, taken.effective, taken.capacity) == (
        "scripted",
        Ceilings(128, 16),
        Ceilings(512, 16),
    )
    gpu = scheduler.groups["gpu"]
    # A ceiling above what every replica takes makes no difference, and cannot be seen from outside.
    assert gpu.ceilings == (128, 0)
    taken.apply(Setting(max_running_requests=4))
    assert gpu.ceilings == (128, 4)
    taken.apply(DEFAULT)
    assert gpu.ceilings == (128, 0)
    taken.flush()
    assert scheduler.flushed == ["gpu-0"]


def test_the_winner_is_kept_and_written_into_the_file(
    mesh: tuple[CeilingScheduler, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    scheduler, address = mesh
    measured_by(monkeypatch, larger_is_better)
    file, plot = groups_file(tmp_path), tmp_path / "tune.svg"
    words = ["tune", "--group", "gpu", "--endpoint", address, *FAST, "--max-concurrency", "32", "--json"]
    assert main([*words, "--output", str(file), "--plot", str(plot)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == {
        "chunked_prefill_size": 512, "max_running_requests": None, "step_window_s": None,
    }  # fmt: skip
    assert (told["accepted"], told["default"]) == (
        True, {"chunked_prefill_size": 128, "max_running_requests": 16},
    )  # fmt: skip
    assert told["settings"][0]["text"] == "chunk 512"
    assert scheduler.groups["gpu"].ceilings == (512, 0)
    assert max(chunk for chunk, _ in scheduler.groups["gpu"].history) == 512, "no more than replicas take"
    (written,) = read_groups(file)
    assert (written.chunked_prefill_size, written.devices) == (512, "hash:0")
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_put_back_writes_the_winner_and_leaves_the_group_as_it_was(
    mesh: tuple[CeilingScheduler, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scheduler, address = mesh
    measured_by(monkeypatch, larger_is_better)
    file = groups_file(tmp_path)
    words = ["tune", "--group", "gpu", "--endpoint", address, *FAST, "--put-back", "--output", str(file)]
    assert main(words) == 0
    assert scheduler.groups["gpu"].ceilings == (128, 0)
    assert read_groups(file)[0].chunked_prefill_size == 512


def test_where_nothing_is_better_the_default_is_written_and_said(
    mesh: tuple[CeilingScheduler, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    scheduler, address = mesh
    measured_by(monkeypatch, lambda setting: report(100.0 if setting == DEFAULT else 90.0))
    file = groups_file(tmp_path)
    before = read_groups(file)
    assert main(["tune", "--group", "gpu", "--endpoint", address, *FAST, "--output", str(file)]) == 0
    assert "the default stays: no setting scored better" in capsys.readouterr().out
    assert scheduler.groups["gpu"].ceilings == (128, 0)
    assert read_groups(file) == before


def test_the_fastest_first_token_loses_where_it_costs_tokens(
    mesh: tuple[CeilingScheduler, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = mesh

    def measure(setting: Setting) -> Any:
        chunk = setting.chunked_prefill_size or 128
        return report(100.0 if chunk >= 64 else 80.0, ttft_ms=chunk)

    measured_by(monkeypatch, measure)
    words = ["tune", "--group", "gpu", "--endpoint", address, *FAST, "--objective", "ttft", "--json"]
    assert main([*words, "--try-max-running-requests", "none"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"]["chunked_prefill_size"] == 64
    assert told["gain"] == pytest.approx(1.0), "half the time is twice as fast"


def test_a_setting_that_fails_is_out_and_the_search_goes_on(
    mesh: tuple[CeilingScheduler, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = mesh

    def measure(setting: Setting) -> Any:
        if setting.chunked_prefill_size == 512:
            raise MeshError("it does not fit")
        if setting.chunked_prefill_size == 256:
            return report(900.0, failed=3)
        return larger_is_better(setting)

    measured_by(monkeypatch, measure)
    words = ["tune", "--group", "gpu", "--endpoint", address, *FAST, "--json"]
    assert main([*words, "--try-chunked-prefill-size", "256,300,512"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"]["chunked_prefill_size"] == 300
    errors = {row["chunked_prefill_size"]: row["error"] for row in told["settings"] if row["error"]}
    assert errors[512] == "it does not fit"
    assert errors[256].startswith("3 of 8 requests failed")


@pytest.mark.parametrize(
    ("fails", "code"), [(MeshError("down"), 1), (KeyboardInterrupt(), 130), (RuntimeError("bug"), None)]
)
def test_whatever_ends_a_search_puts_the_group_back_and_writes_nothing(
    mesh: tuple[CeilingScheduler, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    fails: BaseException, code: int | None,
) -> None:  # fmt: skip
    scheduler, address = mesh
    runs: list[Setting] = []

    def measure(setting: Setting) -> Any:
        runs.append(setting)
        if len(runs) > 4 and (setting == DEFAULT or not isinstance(fails, MeshError)):
            raise fails
        return larger_is_better(setting)

    measured_by(monkeypatch, measure)
    file = groups_file(tmp_path)
    before = file.read_bytes()
    words = ["tune", "--group", "gpu", "--endpoint", address, *FAST, "--output", str(file)]
    if code is None:
        with pytest.raises(RuntimeError):
            main(words)
    else:
        assert main(words) == code
    assert len(runs) > 4
    assert scheduler.groups["gpu"].ceilings == (128, 0)
    assert file.read_bytes() == before


def test_sigterm_puts_the_group_back_too(
    mesh: tuple[CeilingScheduler, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, address = mesh
    before = signal.getsignal(signal.SIGTERM)

    def measure(setting: Setting) -> Any:
        if setting != DEFAULT:
            os.kill(os.getpid(), signal.SIGTERM)
        return larger_is_better(setting)

    measured_by(monkeypatch, measure)
    assert main(["tune", "--group", "gpu", "--endpoint", address, *FAST]) == 130
    assert scheduler.groups["gpu"].ceilings == (128, 0)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def _interrupts_reach_children() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would all that tests start from it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_reach_children")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_real_process_in_the_middle_of_a_load_ends_in_order(
    mesh: tuple[CeilingScheduler, str], number: signal.Signals
) -> None:
    scheduler, endpoint = mesh
    scheduler.awaited = (64, 0)
    script = Script([Message(0.0, (1, 2, 3))])
    async with serve_grpc(script) as (gateway, _):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "meshkit.cli", "tune", "--group", "gpu", "--endpoint", endpoint,
            "--gateway", gateway, "--try-chunked-prefill-size", "64", "--try-max-running-requests", "none",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert await asyncio.to_thread(scheduler.changed.wait, 45), "no candidate was applied"
        script.hang = True
        await asyncio.wait_for(script.hanging.wait(), timeout=45)
        process.send_signal(number)
        output, errors = await asyncio.wait_for(process.communicate(), timeout=45)
        await asyncio.wait_for(script.ended.wait(), timeout=10)
    assert (process.returncode, output) == (130, b"")
    assert errors.decode().rstrip().endswith("interrupted: settings are what they were, nothing is written")
    assert scheduler.groups["gpu"].ceilings == (128, 0)


def test_a_group_that_shares_its_model_is_refused_with_the_way_out(
    mesh: tuple[CeilingScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, address = mesh
    scheduler.groups["cpu"] = Group([(128, 8)])
    assert main(["tune", "--group", "gpu", "--endpoint", address, *FAST]) == 1
    assert "chipmesh traffic set gpu=1" in capsys.readouterr().err
    assert scheduler.groups["gpu"].history == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--group is not given"),
        (("--group", "x", "--objective", "goodput"), "needs its bounds"),
        (("--group", "x", "--objective", "speed"), "throughput, goodput, ttft are known"),
        (("--group", "x", "--try-step-window", "0.1"), "keeps its window"),
        (("--group", "x", "--try-chunked-prefill-size", "0,64"), "whole numbers from 1"),
        (("--group", "x", "--try-max-running-requests", "8;9"), "whole numbers from 1"),
        (("--model-path", "m", "--try-step-window", "2"), "seconds from 0 to 1"),
        (("--group", "x", "--random-input-len", "0"), "chipmesh tune: field 'random_input_len'"),
        (("--group", "x", "--plot", "figure.gif"), "--plot"),
        (("--group", "x", "--rounds", "3"), "--rounds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words, "--gateway", "127.0.0.1:1", "--endpoint", "127.0.0.1:1"]) == 2
    assert told in capsys.readouterr().err


def test_an_unknown_group_is_told_with_those_there_are(
    mesh: tuple[CeilingScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = mesh
    assert main(["tune", "--group", "gpux", "--endpoint", address, *FAST]) == 1
    assert "there is: gpu" in capsys.readouterr().err
