"""Which operators a model calls, and with which sizes: seen by building it on weights without values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshkit.modelstore.sharding import ALONE, RankPlace
from plugins.sdk.operator_table import BoundOperator
from plugins.sdk.planning import CallSite
from plugins.sdk.slot_sampling import Samplers
from worker_svc.layers.quantization import QuantizationPolicy
from worker_svc.models.architecture import ModelContext
from worker_svc.models.registry import find_architecture
from worker_svc.parallel.links import NoLinks
from worker_svc.weights import ShapesOnly
from worker_svc.weights.parts import RankWeights


class SiteRecorder:
    """Takes down what a model binds, in order; nothing that it hands out can be called."""

    def __init__(self) -> None:
        self.sites: list[CallSite] = []

    def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
        """As OperatorBinder says."""
        self.sites.append(CallSite(name, where, sizes))
        return BoundOperator(name, where, _not_to_be_called, _left_alone)


def collect_call_sites(
    config: Mapping[str, Any], *, vocab_size: int, policy: QuantizationPolicy, place: RankPlace = ALONE
) -> list[CallSite]:
    """All call sites of a model, or of the part that a rank runs, and of sampling its tokens.

    Raises:
        InvalidArgument: (model_path) an architecture that is not known. (tensor_parallel_size,
            pipeline_parallel_size) the model does not divide so.
    """
    recorder = SiteRecorder()
    _, factory = find_architecture(config)
    factory(
        ModelContext(
            config=config,
            source=ShapesOnly(config) if place == ALONE else RankWeights(ShapesOnly(config), config, place),
            operators=recorder,
            dtype=torch.float32,
            device=torch.device("meta"),
            progress=_unwatched,
            policy=policy,
            links=NoLinks(place),
        )
    )
    Samplers.bind(recorder, vocab_size)
    return recorder.sites


def _unwatched(share: float) -> None:
    del share


def _not_to_be_called(*arguments: object) -> NoReturn:
    raise AssertionError(
        f"an operator was called while call sites were collected: {len(arguments)} arguments"
    )


def _left_alone(parameter: str, weight: Tensor) -> Tensor:
    del parameter
    return weight
