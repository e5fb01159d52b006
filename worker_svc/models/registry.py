"""Architectures by the name that config.json gives them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from meshkit.errors import InvalidArgument
from worker_svc.models.architecture import ModelFactory
from worker_svc.models.decoder import Decoder, DecoderFamily
from worker_svc.models.gemma import GEMMA2, GEMMA3
from worker_svc.models.llama import LLAMA, QWEN3
from worker_svc.models.mixtures import MIXTRAL, QWEN2_MOE, QWEN3_MOE

_FAMILIES: dict[str, DecoderFamily] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
}


def find_architecture(config: Mapping[str, Any]) -> tuple[str, ModelFactory]:
    """The first of the configuration's architectures that is known, and what builds it.

    Raises:
        InvalidArgument: (model_path) none is known.
    """
    named = config.get("architectures") or []
    for name in named:
        if name in _FAMILIES:
            return name, partial(Decoder, family=_FAMILIES[name])
    raise InvalidArgument(
        f"the model's architecture is {', '.join(map(str, named)) or 'not named'}; "
        f"supported: {', '.join(_FAMILIES)}",
        field="model_path",
        reason="ARCHITECTURE_UNSUPPORTED",
    )
