"""The executor's shell imports no tensor framework, and speaks with its parent over two pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_svc.executor.settings import ExecutorSettings
from worker_svc.executor_setup import advertised

ROOT = Path(__file__).resolve().parents[3]
LOAD_HASH = """
import sys
sys.modules["torch"] = None  # as on a machine without it
import worker_svc.app, worker_svc.executor.app
from worker_svc.plugin_loader import load_plugin
load_plugin("hash", {})
assert not [name for name in sys.modules if name.startswith("torch.")]
"""
NOISY = """
from worker_svc.executor.parent_pipe import ParentPipe
pipe = ParentPipe.claim()
print("noise")
pipe.say({"a": 1})
"""
WITHOUT_GRPC = """
import runpy, sys
sys.modules["grpc"] = None
runpy.run_module("worker_svc.executor", run_name="__main__")
"""


def python(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def executor() -> Iterator[subprocess.Popen[bytes]]:
    with python("-m", "worker_svc.executor") as process:
        yield process
        process.kill()


def settings(**values: object) -> bytes:
    chosen = {"backend": "hash", "instance_id": "i", "log_level": "error", **values}
    return ExecutorSettings.model_validate(chosen).model_dump_json().encode() + b"\n"


def first_line(process: subprocess.Popen[bytes], line: bytes) -> dict[str, dict[str, str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    answer: dict[str, dict[str, str]] = json.loads(process.stdout.readline())
    return answer


def test_the_shell_and_a_plugin_with_its_own_runner_need_no_torch() -> None:
    process = python("-c", LOAD_HASH)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()


def test_the_executor_ends_when_its_stdin_closes(executor: subprocess.Popen[bytes]) -> None:
    assert "address" in first_line(executor, settings())
    assert executor.stdin is not None
    executor.stdin.close()
    assert executor.wait(10) == 0


def test_prints_of_a_runtime_do_not_reach_the_pipe() -> None:
    process = python("-c", NOISY)
    stdout, stderr = process.communicate()
    assert stdout == b'{"a": 1}\n'
    assert b"noise" in stderr


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"\n", "stdin"),
        (b"{\n", "stdin"),
        (b'{"backend": "hash"}\n', "instance_id"),
        (b'{"backend": "hash", "instance_id": "i", "colour": 1}\n', "colour"),
        (settings(backend_options={"speed": "1"}), "backend_options.speed"),
        (settings(listen="nowhere"), "listen"),
    ],
)
def test_wrong_settings_are_answered_with_the_field(
    executor: subprocess.Popen[bytes], line: bytes, field: str
) -> None:
    error = first_line(executor, line)["error"]
    assert error["field"] == field
    assert executor.wait(10) == 1


def test_an_interpreter_that_lacks_a_library_says_which() -> None:
    process = python("-c", WITHOUT_GRPC)
    stdout, _ = process.communicate(settings())
    error = json.loads(stdout)["error"]
    assert "grpc" in error["message"]
    assert (error["field"], process.returncode) == ("executor.python", 1)


def test_the_advertised_address_takes_the_bound_port_where_it_has_none() -> None:
    assert advertised("0.0.0.0:71", None) == "0.0.0.0:71"
    assert advertised("0.0.0.0:71", "node-1") == "node-1:71"
    assert advertised("0.0.0.0:71", "node-1:80") == "node-1:80"
    assert advertised("unix:/x", None) == "unix:/x"
