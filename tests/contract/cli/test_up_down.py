"""`chipmesh up` and `down`: processes started, watched and stopped, also when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.processes import ProcessRecord, is_alive, record_process, start_ticks, wait_until_gone
from meshkit.cli.state import StateDir
from tests.support.hash_model import write_hash_model

HERE = Path(__file__).parent
PATIENCE_S = 30.0


class Cli:
    """Runs `chipmesh` with stand-in services, in a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder / "state")
        self.model = folder / "model"
        self.model.mkdir()
        write_hash_model(self.model)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(_stand_in_packages(folder / "packages")),
            "CHIPMESH_STATE_DIR": str(self.state.root),
            "CHIPMESH_CACHE_DIR": str(folder / "cache"),
            "STAND_IN_BEHAVIOUR": "{}",
        }

    def behave(self, **behaviours: str) -> None:
        """What stand-ins do, by name with '_' for '-'."""
        named = {name.replace("_", "-"): behaviour for name, behaviour in behaviours.items()}
        self._environment["STAND_IN_BEHAVIOUR"] = json.dumps(named)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command, running."""
        command = [sys.executable, "-m", "meshkit.cli", *words]
        # From a folder without the real packages: `python -m` looks there first.
        return subprocess.Popen(
            command,
            cwd=self.model,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command, ended."""
        with self.start(*words) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def up(self, *flags: str) -> tuple[str, ...]:
        """The words of `up` for the test's model."""
        return ("up", "--backend", "hash", "--model-path", str(self.model), "--load-format", "dummy", *flags)

    def services(self) -> list[ProcessRecord]:
        """The service processes that mesh.json names now."""
        mesh = self.state.read_mesh()
        return [service.process for service in mesh.services] if mesh is not None else []

    def stop_order(self) -> list[str]:
        """Names of stand-ins in the order in which they were told to stop."""
        return (self.state.root / "ready" / "order").read_text().split()


def _stand_in_packages(folder: Path) -> Path:
    """Packages named as the services', each with an `app` whose main is the stand-in's."""
    for package in ("gateway", "scheduler_svc", "worker_svc"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("")
        source = (HERE / "stand_in.py").read_text().replace("def serve(", "def main(")
        (folder / package / "app.py").write_text(source)
    return folder


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Polls a state; fails naming it when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE_S:.0f} s"
        time.sleep(0.02)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    yield cli
    assert cli.run("down").returncode == 0
    assert cli.state.read_mesh() is None


def pids_of(description: dict[str, Any]) -> list[int]:
    """All pids that `up --json` tells."""
    services = [
        description["launcher"],
        description["gateway"],
        description["scheduler"],
        *description["workers"],
    ]
    return [service["pid"] for service in services]


def test_a_detached_mesh_tells_its_endpoints_and_pids_and_stays_up(cli: Cli) -> None:
    done = cli.run(*cli.up("--detach", "--json", "--device-groups", "hash:0;hash:1"))
    assert done.returncode == 0, done.stderr
    description = json.loads(done.stdout)
    assert [worker["name"] for worker in description["workers"]] == ["worker-0", "worker-1"]
    assert description["workers"][0]["executor_pid"] == 12345
    assert description["gateway"]["address"] == "127.0.0.1:1"
    assert "--endpoint 127.0.0.1:1" in description["command"]
    assert all(start_ticks(pid) is not None for pid in pids_of(description))


def test_down_stops_everything_in_order_and_a_second_one_is_fine(cli: Cli) -> None:
    description = json.loads(cli.run(*cli.up("--detach", "--json")).stdout)
    processes = [record_process(pid) for pid in pids_of(description)]
    assert cli.run("down").returncode == 0
    assert not any(process is not None and is_alive(process) for process in processes)
    assert cli.stop_order() == ["gateway", "worker-0", "scheduler"]
    again = cli.run("down", "--json")
    assert (again.returncode, json.loads(again.stdout)["stopped"]) == (0, False)


def test_a_second_up_in_the_same_folder_is_refused_and_harms_nothing(cli: Cli) -> None:
    cli.run(*cli.up("--detach"))
    before = cli.services()
    for flags in ((), ("--detach",)):
        refused = cli.run(*cli.up(*flags))
        assert refused.returncode == 1
        assert "chipmesh down" in refused.stderr
    assert cli.services() == before
    assert all(is_alive(process) for process in before)


@pytest.mark.parametrize("flags", [(), ("--detach",)], ids=["foreground", "detached"])
def test_a_service_that_dies_at_start_ends_up_with_its_last_words_and_takes_the_rest_along(
    flags: tuple[str, ...], cli: Cli
) -> None:
    cli.behave(worker_0="die: device: 7 is no device of this chip")
    failed = cli.run(*cli.up(*flags, "--json"))
    assert failed.returncode == 1
    assert "device: 7 is no device of this chip" in failed.stderr.splitlines()[-1]
    assert "worker-0" in json.loads(failed.stdout)["error"]["message"]
    assert cli.state.read_mesh() is None
    assert set(cli.stop_order()) == {"gateway", "scheduler"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_mesh_in_the_foreground_stops_in_order_at_a_signal(number: signal.Signals, cli: Cli) -> None:
    with cli.start(*cli.up()) as launcher:
        assert launcher.stdout is not None
        shown = launcher.stdout.readline()
        processes = cli.services()
        launcher.send_signal(number)
        _, told = launcher.communicate(timeout=PATIENCE_S)
    assert "chipmesh is up" in shown
    assert launcher.returncode == 0
    assert cli.stop_order() == ["gateway", "worker-0", "scheduler"]
    assert not any(is_alive(process) for process in processes)
    assert "worker-0: stopped" in told


def test_a_signal_before_the_mesh_is_up_stops_what_was_started(cli: Cli) -> None:
    cli.behave(worker_0="hang")
    with cli.start(*cli.up()) as launcher:
        wait_for(lambda: len(cli.services()) == 3, "the start of three services")
        processes = cli.services()
        launcher.send_signal(signal.SIGTERM)
        _, told = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 1
    assert "before the mesh was up" in told
    assert not any(is_alive(process) for process in processes)


def test_a_service_that_is_never_ready_is_named_after_the_time_given(cli: Cli) -> None:
    cli.behave(scheduler="hang")
    failed = cli.run(*cli.up("--start-timeout", "2"))
    assert failed.returncode == 1
    assert "scheduler not ready after 2 s" in failed.stderr


def test_down_stops_what_a_killed_launcher_left(cli: Cli) -> None:
    description = json.loads(cli.run(*cli.up("--detach", "--json")).stdout)
    launcher = record_process(description["launcher"]["pid"])
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)
    assert wait_until_gone([launcher], timeout_s=PATIENCE_S) == []
    left = cli.services()
    assert all(is_alive(process) for process in left)
    assert cli.run(*cli.up("--detach")).returncode == 1, "a part of a mesh still runs"
    assert cli.run("down").returncode == 0
    assert not any(is_alive(process) for process in left)


def test_the_launcher_tells_of_a_service_that_ends_by_itself(cli: Cli) -> None:
    with cli.start(*cli.up()) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        mesh = cli.state.read_mesh()
        assert mesh is not None
        (worker,) = mesh.of_kind("worker")
        os.kill(worker.process.pid, signal.SIGKILL)
        assert launcher.stderr is not None
        told = next(line for line in launcher.stderr if "worker-0: ended by itself" in line)
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE_S)
    assert "[exit code -9]" in told
    assert launcher.returncode == 0


def test_progress_of_loading_is_shown(cli: Cli) -> None:
    done = cli.run(*cli.up("--detach"))
    assert "worker-0: weights 50%" in done.stderr


def test_a_model_that_is_not_there_is_told_before_any_process_starts(cli: Cli) -> None:
    failed = cli.run("up", "--model-path", "/nowhere", "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["error"]["field"] == "model_path"
    assert "starting" not in failed.stderr
