"""Architectures by the name that config.json gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshkit.errors import InvalidArgument
from worker_svc.models.architecture import ModelFactory
from worker_svc.models.llama import LlamaModel

_MODELS: dict[str, ModelFactory] = {"LlamaForCausalLM": LlamaModel}


def find_architecture(config: Mapping[str, Any]) -> tuple[str, ModelFactory]:
    """The first of the configuration's architectures that is known, and what builds it.

    Raises:
        InvalidArgument: (model_path) none is known.
    """
    named = config.get("architectures") or []
    for name in named:
        if name in _MODELS:
            return name, _MODELS[name]
    raise InvalidArgument(
        f"the model's architecture is {', '.join(map(str, named)) or 'not named'}; "
        f"supported: {', '.join(_MODELS)}",
        field="model_path",
        reason="ARCHITECTURE_UNSUPPORTED",
    )
