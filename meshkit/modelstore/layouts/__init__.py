"""What a configuration means, by model family: defaults, refusals, tensor names and shapes. No torch.

A family is one `FamilyLayout` in a file of this package; what builds the model from it is worker_svc.models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshkit.modelstore.layouts.completion import complete
from meshkit.modelstore.layouts.family import FamilyLayout
from meshkit.modelstore.layouts.gemma import GEMMA2, GEMMA3
from meshkit.modelstore.layouts.llama import LLAMA, MISTRAL
from meshkit.modelstore.layouts.mixtral import MIXTRAL
from meshkit.modelstore.layouts.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from meshkit.modelstore.problems import model_path_error

_FAMILIES: dict[str, FamilyLayout] = {
    family.architecture: family
    for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3)
}
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)


def complete_config(document: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The configuration with every field that the executor reads filled in, Hugging Face's names kept.

    Added: `layer_types` where it is left out; `layer_windows`, tokens that each layer's attention reaches
    back, 0: all (also where the window is as long as the context); `rms_norm_offset`, what is added to stored
    weights of norms; for mixtures `expert_layers`, whether each layer has experts.

    Raises:
        InvalidArgument: (model_path) an architecture, activation or quantisation that we do not run, or a
            size that is missing or not a positive integer.
    """
    return complete(document, _find_family(document, source=source), source=source)


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a completed `config` needs, in model order."""
    family = _find_family(config, source="the configuration")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in family.layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _find_family(document: Mapping[str, Any], *, source: str) -> FamilyLayout:
    architectures = document.get("architectures") or []
    for name in architectures:
        if name in _FAMILIES:
            return _FAMILIES[name]
    named = ", ".join(map(str, architectures)) or "none"
    raise model_path_error(
        f"{source} names architecture {named}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
        reason="ARCHITECTURE_UNSUPPORTED",
    )
