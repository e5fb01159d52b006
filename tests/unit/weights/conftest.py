"""The small real model, as scripts/test.sh pulls it beforehand."""

from __future__ import annotations

import pytest

from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from meshkit.modelstore.locations import pulled_model_dir


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    cache_dir = default_cache_dir()
    if not pulled_model_dir("smollm2-135m", cache_dir=cache_dir).is_dir():
        pytest.skip(f"smollm2-135m is not in {cache_dir}; `chipmesh pull smollm2-135m` fetches it")
    return open_model("smollm2-135m", cache_dir=cache_dir)
