"""The plugin's collectives with gloo in NCCL's place: its own reduce_scatter, one GPU for each rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from meshkit.errors import AlreadyExists, DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from plugins.cuda.collectives import NcclCollectives
from tests.unit.cuda_plugin.stand_in import runtime_of

WORLD = 2


def on_ranks(
    folder: Path, work: Callable[[NcclCollectives, int], object], *, devices: tuple[int, ...] = ()
) -> list[object]:
    """What `work` returned on each rank, each on a thread of its own. devices: of runners; (): none made."""

    folder.mkdir(exist_ok=True)

    def run(rank: int) -> object:
        runtime = runtime_of()
        if devices:
            runtime.device, runtime.settled = devices[rank], True
        collectives = NcclCollectives(runtime)
        collectives.init_group(
            f"ring-{folder.name}",
            rank=rank,
            world_size=WORLD,
            rendezvous=f"file://{folder}/meet",
            timeout_s=20.0,
        )
        outcome = work(collectives, rank)
        collectives.barrier(f"ring-{folder.name}")
        for _ in range(2):
            collectives.destroy_group(f"ring-{folder.name}")
        return outcome

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_primitives_do_what_they_say(tmp_path: Path, dtype: torch.dtype) -> None:
    own = [torch.tensor([[-1, 2], [3, -4]], dtype=dtype) + 10 * rank for rank in range(WORLD)]
    name = f"ring-{tmp_path.name}"

    def work(collectives: NcclCollectives, rank: int) -> object:
        with pytest.raises(AlreadyExists):
            collectives.init_group(name, rank=rank, world_size=WORLD, rendezvous="", timeout_s=1.0)
        with pytest.raises(InvalidArgument, match="splits the first dimension, 3, over 2 ranks"):
            collectives.reduce_scatter(name, torch.zeros(3))
        mine = own[rank].clone()
        results = (
            collectives.all_reduce(name, mine),
            collectives.all_gather(name, mine),
            collectives.reduce_scatter(name, mine),
            collectives.broadcast(name, mine, root=1),
        )
        assert torch.equal(mine, own[rank])
        return results

    for rank, results in enumerate(on_ranks(tmp_path, work)):
        assert isinstance(results, tuple)
        total = own[0] + own[1]
        expected = [total, torch.stack(own), total[rank : rank + 1], own[1]]
        assert all(map(torch.equal, results, expected))


def test_two_ranks_on_one_gpu_are_refused_by_name(tmp_path: Path) -> None:
    """NCCL itself would fail without a word about ranks."""
    with pytest.raises(FailedPrecondition, match=r"ranks 0, 1 of group 'ring-.*' work on one GPU") as error:
        on_ranks(tmp_path, lambda collectives, rank: None, devices=(1, 1))
    assert error.value.reason == "DEVICE_SHARED"


def test_ranks_work_on_their_runners_devices_or_take_them_in_turn(tmp_path: Path) -> None:
    def device(collectives: NcclCollectives, rank: int) -> object:
        return collectives._runtime.device

    assert on_ranks(tmp_path / "a", device) == [0, 1]
    assert on_ranks(tmp_path / "b", device, devices=(1, 0)) == [1, 0]


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="rank 1 did not come") as error:
        NcclCollectives(runtime_of()).init_group(
            "lonely", rank=0, world_size=2, rendezvous=f"file://{tmp_path}/meet", timeout_s=0.2
        )
    assert error.value.metadata["missing"] == "1"


def test_an_unknown_group_is_not_found_and_leaving_it_is_fine() -> None:
    collectives = NcclCollectives(runtime_of())
    collectives.destroy_group("ring")
    with pytest.raises(NotFound, match="InitGroup"):
        collectives.barrier("ring")
