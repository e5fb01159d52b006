"""The same with a real model's tokenizer and template; scripts/test.sh pulls it beforehand."""

from __future__ import annotations

import pytest

from gateway.text import Tokenizer
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from meshkit.modelstore.locations import pulled_model_dir
from tests.contract.gateway.gateway_client import MeshFactory

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    cache_dir = default_cache_dir()
    if not pulled_model_dir(NAME, cache_dir=cache_dir).is_dir():
        pytest.skip(f"{NAME} is not in {cache_dir}; `chipmesh pull {NAME}` fetches it")
    return open_model(NAME, cache_dir=cache_dir, need_weights=False)


async def test_a_conversation_runs_through_the_models_own_template_and_tokens(
    run_mesh: MeshFactory, folder: ModelFolder
) -> None:
    answer = "Naïve 漢字 and 👩‍👩‍👧 families.\n\nEND of it"
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    models = [{"name": NAME, "path": str(folder.source)}]
    async with run_mesh(models=models, cache_dir=str(default_cache_dir())) as mesh:
        session = await mesh.session()
        for cut in range(len(tokens) + 1):
            stream = mesh.generate([("user", "hi")], stop={"stop_strings": ["\n\nEND"]})
            request = await session.accepts()
            accepted = await stream.start()
            prompt = tokenizer.decode(accepted.prompt_token_ids, skip_special_tokens=False)
            assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
            assert list(request.submit.stop_token_ids) == list(folder.eos_token_ids)
            request.tokens(0, tokens[:cut])
            request.tokens(cut, tokens[cut:])
            finished = await stream.end()
            assert stream.text == "Naïve 漢字 and 👩‍👩‍👧 families."
            assert finished.matched_stop == "\n\nEND"
            assert await request.ended_by_gateway() == "stop"
            assert stream.token_ids == tokens[: finished.usage.completion_tokens]
