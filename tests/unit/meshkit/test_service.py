"""The life of a service: exit codes and signals of real processes, the ready file, supervised tasks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from meshkit.errors import Internal
from meshkit.service import StopSignal, supervise, write_ready

ROOT = Path(__file__).resolve().parents[3]


def start(main: str) -> subprocess.Popen[str]:
    """A process whose `main(stop)` has the given body."""
    program = (
        "import asyncio, sys\n"
        "from meshkit.errors import *\n"
        "from meshkit.service import run_service\n"
        "async def main(stop):\n"
        f"{textwrap.indent(textwrap.dedent(main), '    ')}\n"
        "sys.exit(run_service(main, name='example'))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that ends by itself."""
    with process:
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


def test_a_clean_end_is_exit_code_0_on_a_uvloop() -> None:
    code, out, err = ended(start("print(type(asyncio.get_running_loop()).__module__)"))
    assert (code, out.strip(), err) == (0, "uvloop", "")


def test_the_collector_does_not_look_again_at_what_was_there_before_the_service() -> None:
    code, out, _ = ended(start("import gc; print(gc.get_freeze_count() > len(gc.get_objects()))"))
    assert (code, out.strip()) == (0, "True")


def test_bad_input_is_one_line_and_exit_code_2() -> None:
    code, _, err = ended(start("raise InvalidArgument('listen is x; give HOST:PORT', field='listen')"))
    assert (code, err) == (2, "example: listen is x; give HOST:PORT\n")


def test_another_mesh_error_is_one_line_and_exit_code_1() -> None:
    code, _, err = ended(start("raise FailedPrecondition('port 1 is in use', field='listen')"))
    assert (code, err) == (1, "example: port 1 is in use\n")


def test_an_unknown_exception_is_a_traceback_and_exit_code_1() -> None:
    code, _, err = ended(start("raise KeyError('lost')"))
    assert code == 1
    assert "Traceback" in err
    assert "KeyError: 'lost'" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_main_to_stop_and_its_clean_up_runs(number: signal.Signals) -> None:
    process = start("""
        print('ready', flush=True)
        await stop.wait()
        print('stopping because of', stop.reason)
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, out, _ = ended(process)
    assert (code, out) == (0, f"stopping because of {number.name}\n")


def test_a_second_signal_ends_a_service_that_hangs_while_stopping() -> None:
    process = start("""
        print('ready', flush=True)
        await stop.wait()
        print('hangs', flush=True)
        await asyncio.Event().wait()
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 128 + signal.SIGTERM
    assert "second SIGTERM" in err


def test_meshkit_imports_no_torch() -> None:
    modules = "rpc.server rpc.channel service config http.observability telemetry.metrics telemetry.logging"
    imports = "; ".join(f"import meshkit.{name}" for name in modules.split())
    program = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_the_ready_file_is_never_seen_half_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "gateway.json"
    payload = {"service": "gateway", "pid": os.getpid(), "address": "127.0.0.1:1", "fill": "x" * 100_000}
    write_ready(path, payload)
    done = threading.Event()
    seen: list[object] = []

    def read() -> None:
        while not done.is_set():
            seen.append(json.loads(path.read_text()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(50):
            write_ready(path, payload)
    finally:
        done.set()
        reader.join()
    assert all(one == payload for one in seen)
    assert [entry.name for entry in path.parent.iterdir()] == ["gateway.json"]


def test_a_payload_that_is_no_json_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_ready(tmp_path / "ready", {"address": object()})
    assert list(tmp_path.iterdir()) == []


async def test_the_first_reason_to_stop_is_kept() -> None:
    stop = StopSignal()
    assert not stop.is_set()
    stop.set("SIGTERM")
    stop.set("later")
    await stop.wait()
    assert (stop.is_set(), stop.reason) == (True, "SIGTERM")


async def until_cancelled(cancelled: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append(name)
        raise


async def test_background_work_runs_until_the_body_ends() -> None:
    cancelled: list[str] = []

    async def body() -> int:
        await asyncio.sleep(0)
        assert cancelled == []
        return 7

    result = await supervise(
        body(), engine=until_cancelled(cancelled, "engine"), leases=until_cancelled(cancelled, "leases")
    )
    assert result == 7
    assert sorted(cancelled) == ["engine", "leases"]


async def test_a_background_task_that_fails_ends_body_and_the_others_with_its_error() -> None:
    cancelled: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await supervise(
            until_cancelled(cancelled, "body"), engine=fail(), leases=until_cancelled(cancelled, "leases")
        )
    assert sorted(cancelled) == ["body", "leases"]


async def test_a_background_task_that_just_returns_is_an_error_that_names_it() -> None:
    async def end_early() -> None:
        return

    with pytest.raises(Internal, match="lease watch ended"):
        await supervise(until_cancelled([], "body"), **{"lease watch": end_early()})


async def test_the_error_of_the_body_comes_out_after_the_background_has_stopped() -> None:
    cancelled: list[str] = []

    async def body() -> None:
        await asyncio.sleep(0)
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await supervise(body(), engine=until_cancelled(cancelled, "engine"))
    assert cancelled == ["engine"]


async def test_cancelling_from_outside_stops_everything() -> None:
    cancelled: list[str] = []
    task = asyncio.ensure_future(
        supervise(until_cancelled(cancelled, "body"), engine=until_cancelled(cancelled, "engine"))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == ["body", "engine"]
