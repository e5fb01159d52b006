"""What OpenAI's clients see of a death in the mesh: nothing."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from plugins.hash.oracle import continue_tokens
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import assert_page_identity, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

COUNT = 400


def prompt_of(index: int) -> list[int]:
    return [(7 * position) % VOCAB_SIZE for position in range(40)] + [index] * (1 + index % 9)


def test_streams_survive_the_death_of_an_executor_without_losing_a_token(tmp_path: Path) -> None:
    model = tmp_path / "hash-model"
    model.mkdir()
    arguments = (
        "--backend", "hash", "--model-path", str(write_hash_model(model)), "--load-format", "dummy",
        "--backend-option", "step_ms=5",
    )  # fmt: skip
    with running_mesh(tmp_path / "mesh", *arguments, "--device-groups", "hash:0,hash:1") as mesh:
        base_url = f"http://{mesh.description['gateway']['openai_address']}/v1"
        victim = mesh.description["workers"][0]["executor_pid"]
        reached: list[int] = []

        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:

            def one(index: int) -> None:
                stream = client.completions.create(
                    model="hash-model",
                    prompt=prompt_of(index),
                    max_tokens=COUNT,
                    stream=True,
                    temperature=0,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
                seen: list[int] = []
                for chunk in stream:
                    seen += (chunk.choices[0].model_extra or {}).get("token_ids", [])
                    if index == 0 and not reached and len(seen) > 20:
                        reached.append(len(seen))
                        os.kill(victim, signal.SIGKILL)
                assert seen == continue_tokens(prompt_of(index), COUNT, VOCAB_SIZE)

            with ThreadPoolExecutor(16) as pool:
                list(pool.map(one, range(16)))
        assert 0 < reached[0] < COUNT, "the executor was not killed in the middle"
        assert_page_identity(mesh.wait_until_idle())
