"""gloo collectives between real ranks, each on a thread of its own; a rank that does not come is named."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshkit.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound
from plugins.cpu.collectives import GlooCollectives
from plugins.sdk.registry import load_backend

WORLD = 3
TIMEOUT_S = 20.0


def on_ranks(
    rendezvous: str, work: Callable[[GlooCollectives, int], object], world: int = WORLD
) -> list[object]:
    """What `work` returned on each rank."""

    def run(rank: int) -> object:
        collectives = GlooCollectives()
        collectives.init_group(
            "ring", rank=rank, world_size=world, rendezvous=rendezvous, timeout_s=TIMEOUT_S
        )
        outcome = work(collectives, rank)
        collectives.barrier("ring")
        collectives.destroy_group("ring")
        collectives.destroy_group("ring")
        return outcome

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


LOOPBACK = "0100007F"  # as /proc/net/tcp writes it
LISTEN = "0A"


def listening_addresses() -> list[str]:
    """ "ADDRESS:PORT" of this process' own sockets that listen, as the kernel writes them."""
    inodes = {link for fd in Path("/proc/self/fd").iterdir() if (link := _target(fd)).startswith("socket:")}
    lines = [
        line for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    rows = [line.split() for line in lines]
    return [row[1] for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in inodes]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""  # closed meanwhile


@pytest.fixture
def meeting_point(tmp_path: Path) -> str:
    return f"file://{tmp_path}/rendezvous"


def own(rank: int) -> Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(3, 2) + 10 * rank


def test_all_reduce_sums_and_leaves_the_input(meeting_point: str) -> None:
    def work(collectives: GlooCollectives, rank: int) -> object:
        mine = own(rank)
        total = collectives.all_reduce("ring", mine)
        assert torch.equal(mine, own(rank))
        return total

    expected = own(0) + own(1) + own(2)
    for total in on_ranks(meeting_point, work):
        assert isinstance(total, Tensor)
        assert torch.equal(total, expected)


def test_all_gather_stacks_by_rank(meeting_point: str) -> None:
    for gathered in on_ranks(meeting_point, lambda it, rank: it.all_gather("ring", own(rank))):
        assert isinstance(gathered, Tensor)
        assert torch.equal(gathered, torch.stack([own(rank) for rank in range(WORLD)]))


def test_reduce_scatter_gives_each_rank_its_part(meeting_point: str) -> None:
    parts = on_ranks(meeting_point, lambda it, rank: it.reduce_scatter("ring", own(rank)))
    total = own(0) + own(1) + own(2)
    for rank, part in enumerate(parts):
        assert isinstance(part, Tensor)
        assert torch.equal(part, total[rank : rank + 1])


def test_broadcast_gives_everybody_the_roots_input(meeting_point: str) -> None:
    for received in on_ranks(meeting_point, lambda it, rank: it.broadcast("ring", own(rank), root=2)):
        assert isinstance(received, Tensor)
        assert torch.equal(received, own(2))


def test_ranks_meet_over_tcp_too() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sums = on_ranks(f"tcp://127.0.0.1:{port}", lambda it, rank: it.all_reduce("ring", own(rank)), world=2)
    assert all(isinstance(total, Tensor) and torch.equal(total, own(0) + own(1)) for total in sums)


def test_ranks_that_meet_on_loopback_listen_nowhere_else() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(collectives: GlooCollectives, rank: int) -> object:
        collectives.barrier("ring")
        return listening_addresses() if rank == 0 else None

    before = listening_addresses()
    while_joined = on_ranks(f"tcp://127.0.0.1:{port}", work)[0]
    assert isinstance(while_joined, list)
    opened = [each for each in while_joined if each not in before]
    assert opened
    assert {address.rpartition(":")[0] for address in opened} == {LOOPBACK}


def test_a_rank_that_never_joins_is_named(meeting_point: str) -> None:
    def join(rank: int) -> str:
        with pytest.raises(DeadlineExceeded) as caught:
            GlooCollectives().init_group(
                "ring", rank=rank, world_size=3, rendezvous=meeting_point, timeout_s=0.5
            )
        return caught.value.metadata["missing"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, (0, 2))) == ["1", "1"]


def test_what_makes_no_sense_is_refused(meeting_point: str) -> None:
    collectives = GlooCollectives()
    for rank, world, place in (
        (2, 2, meeting_point),
        (0, 0, meeting_point),
        (0, 1, "http://x"),
        (0, 1, "tcp://h"),
        (0, 1, f"{meeting_point}/of/no/folder"),
    ):
        with pytest.raises(InvalidArgument):
            collectives.init_group("ring", rank=rank, world_size=world, rendezvous=place, timeout_s=1.0)
    with pytest.raises(NotFound, match="InitGroup"):
        collectives.barrier("ring")
    collectives.init_group("ring", rank=0, world_size=1, rendezvous=meeting_point, timeout_s=5.0)
    with pytest.raises(AlreadyExists):
        collectives.init_group("ring", rank=0, world_size=1, rendezvous=meeting_point, timeout_s=5.0)
    with pytest.raises(InvalidArgument, match="root"):
        collectives.broadcast("ring", own(0), root=1)
    with pytest.raises(InvalidArgument, match="multiple"):
        collectives.reduce_scatter("ring", torch.tensor(1.0))
    collectives.destroy_group("ring")


def test_the_border_between_algorithms_is_by_ranks_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    def algorithms(options: dict[str, str], world: int) -> object:
        def join(rank: int) -> list[str]:
            collectives = load_backend("cpu", options).collectives
            assert collectives is not None
            meeting = f"file://{tmp_path}/{world}-{len(options)}"
            collectives.init_group(
                "ring", rank=rank, world_size=world, rendezvous=meeting, timeout_s=TIMEOUT_S
            )
            found = [collectives.algorithm("ring", size) for size in (1024, (128 << 10) - 1, 128 << 10)]
            collectives.barrier("ring")
            collectives.destroy_group("ring")
            return found

        with ThreadPoolExecutor(world) as pool:
            first, *others = pool.map(join, range(world))
        assert all(each == first for each in others)
        return first

    assert algorithms({}, 2) == ["ring", "ring", "ring"]
    assert algorithms({}, 3) == ["gather", "gather", "ring"]
    assert algorithms({"all_reduce_border": "2048"}, 2) == ["gather", "ring", "ring"]


def test_sums_are_not_split_unless_an_option_says_from_which_rows_on() -> None:
    report = load_backend("cpu", {"overlap_rows": "256"}).capabilities()
    assert (report.overlap_rows, "async_all_reduce" in report.collectives) == (256, True)
    assert load_backend("cpu", {}).capabilities().overlap_rows == 0
    with pytest.raises(InvalidArgument, match="overlap_rows is 'all'") as caught:
        load_backend("cpu", {"overlap_rows": "all"})
    assert caught.value.field == "backend_options.overlap_rows"
