"""What docs/clients.md tells people to type works: its blocks run as they stand, at a mesh's addresses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^## (?P<title>.+?)$|^```(?P<language>sh|python)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks() -> dict[str, tuple[str, str]]:
    """(language, code) by the section that it stands in."""
    found, title = {}, ""
    for match in BLOCK.finditer((ROOT / "docs/clients.md").read_text(encoding="utf-8")):
        if match["title"]:
            title = match["title"]
        elif title:
            found[title] = (match["language"], match["code"])
    return found


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    with running_mesh(
        tmp_path_factory.mktemp("mesh"), "--model-path", "smollm2-135m", "--dtype", "float32"
    ) as mesh:
        yield mesh


@pytest.mark.parametrize("title", blocks())
def test_a_client_of_the_page_gets_its_answer(mesh: RunningMesh, title: str) -> None:
    language, code = blocks()[title]
    code = code.replace("127.0.0.1:50051", mesh.description["gateway"]["address"])
    code = code.replace("127.0.0.1:8000", mesh.description["gateway"]["openai_address"])
    command = ["bash", "-euc", code] if language == "sh" else [sys.executable, "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    expected = {
        "A shell, over gRPC": " Paris",
        "A shell, over HTTP": "data: [DONE]",
        "Python, over gRPC": "the second half again:",
        "Python, with `openai`": "completion_tokens=16",
    }
    assert expected[title] in ended.stdout
