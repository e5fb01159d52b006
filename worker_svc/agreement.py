"""What the ranks of a set agree on as they allocate: the least that any has room for, and who they are."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from chipmesh.device.v1alpha1.execution_pb2 import AllocateKvCacheRequest, LoadModelRequest, RankInfo
from meshkit.errors import FailedPrecondition
from plugins.sdk.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank tells the others. Sizes as its supervisor asked for; address: where they reach it."""

    page_count: int
    page_size_tokens: int
    max_slots: int
    address: str
    device: int
    pid: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """What holds for all ranks. ranks: by number; alone: the one."""

    page_count: int
    page_size_tokens: int
    max_slots: int
    ranks: tuple[RankInfo, ...]


def make_offer(model: LoadModelRequest, sizes: AllocateKvCacheRequest) -> Offer:
    """This process' own."""
    return Offer(
        page_count=sizes.page_count,
        page_size_tokens=sizes.page_size_tokens,
        max_slots=sizes.max_slots,
        address=model.parallel.address,
        device=model.device,
        pid=os.getpid(),
    )


def agree(runner: ModelRunner, offer: Offer) -> Agreement:
    """Exchange offers with the other ranks; all come to the same agreement.

    Raises:
        FailedPrecondition: ranks have pages of different sizes. Else as `ModelRunner.exchange`.
    """
    offers = [Offer(**json.loads(text)) for text in runner.exchange(json.dumps(asdict(offer)))]
    if len({each.page_size_tokens for each in offers}) > 1:
        sizes = ", ".join(f"rank {rank}: {each.page_size_tokens}" for rank, each in enumerate(offers))
        raise FailedPrecondition(
            f"the ranks of a set need pages of one size; page_size_tokens is {sizes}. Set page_size in each "
            "host's configuration",
            field="page_size_tokens",
            reason="PAGE_SIZES_DIFFER",
        )
    return Agreement(
        page_count=min(each.page_count for each in offers),
        page_size_tokens=offer.page_size_tokens,
        max_slots=min(each.max_slots for each in offers),
        ranks=tuple(
            RankInfo(rank=rank, address=each.address, device=each.device, pid=each.pid)
            for rank, each in enumerate(offers)
        ),
    )
