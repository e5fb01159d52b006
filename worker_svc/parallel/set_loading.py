"""What the ranks of a set tell each other as they load, so that all serve the same model or none does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch

from meshkit.errors import FailedPrecondition, MeshError, ResourceExhausted
from plugins.sdk.backend import Backend
from plugins.sdk.runner import LoadedModel, LoadOptions
from worker_svc.first_forward import BadOperator
from worker_svc.parallel.ranks import Ranks, require_collectives


def join_ranks(backend: Backend, options: LoadOptions, device: torch.device) -> Ranks | None:
    """The links to the other ranks, all there; None where the model is not split.

    Raises:
        FailedPrecondition: as require_collectives. DeadlineExceeded, Unavailable: as Ranks.
    """
    parallel = options.parallel
    if parallel is None or parallel.tensor * parallel.pipeline == 1:
        return None
    ranks = Ranks(
        require_collectives(backend, parallel),
        parallel,
        device=device,
        piece_rows=backend.capabilities().overlap_rows,
        sees_overlap=backend.devices.shares_host_memory,
    )
    ranks.join()
    return ranks


def check_same_model(ranks: Ranks, model: LoadedModel) -> None:
    """Returns when all ranks have read their weights.

    Raises:
        FailedPrecondition: (model_path) another rank has another model, dtype or version of the weights, or
            splits sums into other pieces.
    """
    facts = {
        "overlap_rows": str(ranks.piece_rows),
        "architecture": model.architecture,
        "weights_version": model.weights_version,
        "numeric_class": model.numeric_class,
        "kv_cache_dtype": model.kv_cache_dtype,
    }
    said: list[Mapping[str, str]] = [json.loads(text) for text in ranks.exchange(json.dumps(facts))]
    for rank, theirs in enumerate(said):
        for name, value in theirs.items():
            if value != said[0][name]:
                raise FailedPrecondition(
                    f"ranks 0 and {rank} loaded different models: {name} is {said[0][name]!r} on rank 0 and "
                    f"{value!r} on rank {rank}; give all ranks the same files and settings",
                    field="model_path",
                    reason="RANKS_DIFFER",
                )


def all_finite(ranks: Ranks | None, finite: bool) -> bool:
    """Whether the pass was finite on every rank."""
    return finite if ranks is None else not any(ranks.exchange("" if finite else "not finite"))


def first_of_set(ranks: Ranks | None, found: BadOperator | None) -> BadOperator | None:
    """The operator that went wrong first: in the earliest stage, and there after the fewest calls."""
    if ranks is None:
        return found
    said = ranks.exchange("" if found is None else json.dumps(asdict(found)))
    bad = [
        (rank // ranks.place.layout.tensor, replace(BadOperator(**json.loads(text)), rank=str(rank)))
        for rank, text in enumerate(said)
        if text
    ]
    return min(bad, key=lambda each: (each[0], each[1].call))[1] if bad else None


def settle_allocation(ranks: Ranks | None, problem: MeshError | None) -> None:
    """Returns when all ranks have allocated their pages.

    Raises:
        MeshError: `problem`, this rank's own. ResourceExhausted: another rank's.
    """
    said = () if ranks is None else ranks.exchange("" if problem is None else problem.message)
    if problem is not None:
        raise problem
    for rank, text in enumerate(said):
        if text:
            raise ResourceExhausted(f"rank {rank} of the set cannot allocate its KV cache: {text}")
