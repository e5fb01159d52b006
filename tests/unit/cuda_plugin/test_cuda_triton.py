"""The Triton kernels' arithmetic by Triton's interpreter on the host, and that they compile for GPUs.

Triton is no dependency: where it is not installed these tests are skipped. They need processes of their own:
torch may have imported Triton here already, and by then it is settled whether kernels are interpreted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from plugins.cuda.triton_attention import merge_parts

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
CASES = ("norms_agree", "decode_agrees", "norms_take_rows_with_gaps", "decode_stays_below_lengths")


def run_script(name: str, *arguments: str, cache: Path, interpret: bool) -> str:
    """What a script of this folder printed, in a process with or without the interpreter."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TRITON_INTERPRET"] = "1" if interpret else "0"
    command = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=55)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_parts_are_merged_by_weight_and_empty_ones_count_nothing() -> None:
    means = torch.tensor([[[[1.0], [3.0], [100.0]]]])
    logs = torch.tensor([[[0.0, torch.log(torch.tensor(3.0)), float("-inf")]]])
    torch.testing.assert_close(merge_parts(means, logs), torch.tensor([[[2.5]]]))
    assert torch.equal(merge_parts(means[:, :, :1], logs[:, :, :1]), torch.tensor([[[1.0]]]))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each case found."""
    cache = tmp_path_factory.mktemp("triton")
    found: Mapping[str, str] = json.loads(run_script("interpret_kernels.py", cache=cache, interpret=True))
    return found


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_agree(interpreted: Mapping[str, str], case: str) -> None:
    assert set(interpreted) == set(CASES)
    assert interpreted[case] == ""


@needs_triton
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_for_gpus(capability: str, tmp_path: Path) -> None:
    """With the compiler that comes with Triton: no GPU is needed to find code that Triton refuses."""
    assert run_script("compile_kernels.py", capability, cache=tmp_path, interpret=False) == "9"
