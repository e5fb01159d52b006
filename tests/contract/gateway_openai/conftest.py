"""Meshes with OpenAI's interface over models that differ in their chat template."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway_openai.openai_mesh import MeshFactory, OpenAiMesh, openai_mesh
from tests.unit.gateway.tiny_model import write_tiny_model


@pytest.fixture
def run_mesh(tiny_model: Path, tmp_path: Path) -> MeshFactory:
    """`async with run_mesh(template=..., **config) as mesh:`"""

    def run(
        *,
        model: Path | None = None,
        template: str | None = None,
        context_tokens: int | None = None,
        **config: Any,
    ) -> AbstractAsyncContextManager[OpenAiMesh]:
        folder = model or tiny_model
        if template is not None or context_tokens is not None:
            folder = write_tiny_model(tmp_path / "model")
            _change(folder / "tokenizer_config.json", {"chat_template": template} if template else {})
            _change(folder / "config.json", {"max_position_embeddings": context_tokens or 4096})
        return openai_mesh(folder, tmp_path, **config)

    return run


@pytest.fixture
async def mesh(run_mesh: MeshFactory) -> AsyncIterator[OpenAiMesh]:
    """A mesh with defaults."""
    async with run_mesh() as running:
        yield running


def _change(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
