"""What a scenario is, the registry of all, and the hands that it has on a run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from chaos.client import Client, Clients
from chaos.mesh import ChaosMesh, Shape
from chaos.metrics import read_count
from chaos.processes import FaultDidNotHappen, freeze, kill, thaw, until
from chaos.report import Outcome, Target
from chaos.view import Replica, ready_workers
from meshkit.cli.processes import ProcessRecord

DETECTION_TIMEOUT_S = 60.0
FAULT_TAKEN_TIMEOUT_S = 5.0

Inject = Callable[["Run"], Awaitable[None]]
Strike = Callable[[], Awaitable[float]]
"""Does a fault and verifies it; returns its instant, monotonic seconds. Raises FaultDidNotHappen."""


@dataclass(frozen=True)
class Scenario:
    """A line of the scoreboard. Its variants take turns over the runs. tokens: of each stream. full_runs,
    full_streams: how often and how wide the scoreboard wants it.

    variants: by name; each injects its faults while all streams of its run are going, and returns when it has
    done what it wants; streams are then followed to their ends, and the mesh has to settle, with all workers.
    """

    id: str
    title: str
    target: Target
    shape: Shape
    tokens: int
    full_runs: int = 20
    full_streams: int = 32
    variants: dict[str, Inject] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the report says of itself: what this scenario does not cover, and why."""
    over_all: Callable[[Outcome], None] = lambda _: None
    """Adds figures that only all runs together have."""

    def variant(self, name: str) -> Callable[[Inject], Inject]:
        """Decorator: one more variant."""

        def add(inject: Inject) -> Inject:
            self.variants[name] = inject
            return inject

        return add


SCENARIOS: dict[str, Scenario] = {}
"""By id; filled by importing chaos.scenarios."""


def scenario(
    id_: str,
    title: str,
    *,
    target: Target,
    shape: Shape | None = None,
    tokens: int = 250,
    full_runs: int = 20,
    full_streams: int = 32,
    notes: Mapping[str, str] | None = None,
    over_all: Callable[[Outcome], None] = lambda _: None,
) -> Scenario:
    """Define a scenario, see Scenario; its variants follow by its decorator."""
    if id_ in SCENARIOS:
        raise ValueError(f"scenario {id_} is defined twice")
    SCENARIOS[id_] = Scenario(
        id_, title, target, shape or Shape(), tokens, full_runs, full_streams, notes=notes or {},
        over_all=over_all,
    )  # fmt: skip
    return SCENARIOS[id_]


def all_scenarios() -> list[Scenario]:
    """In the order of their numbers."""
    return sorted(SCENARIOS.values(), key=lambda each: int(each.id[1:]))


class Run:
    """One run: a mesh that has settled, streams that are going, and what the scenario does to them."""

    def __init__(
        self, mesh: ChaosMesh, clients: Clients, *, tokens: int, draw: random.Random, share: float = 1.0
    ) -> None:
        self.mesh = mesh
        self.tokens = tokens
        self.clients = clients
        self.draw = draw
        self.share = share
        self.outcome = Outcome(runs=1)
        self.first_fault_at: float | None = None

    def __repr__(self) -> str:
        return f"<Run {self.outcome.faults_injected} faults, {len(self.clients.all)} streams>"

    # ------------------------------------------------------------ choosing

    async def victim(self) -> Replica:
        """A replica by chance, of those that run streams. Raises FaultDidNotHappen where there is none."""
        busy = [replica for replica in await self.mesh.view.replicas() if replica.running]
        if not busy:
            raise FaultDidNotHappen("no replica runs a stream: a fault would show nothing")
        return self.draw.choice(sorted(busy, key=lambda replica: replica.worker))

    def prompt(self) -> list[int]:
        """A prompt of random tokens and of random length; half of them begin alike, to share pages."""
        length = self.draw.randrange(4, 200)
        shared = list(range(64)) if self.draw.random() < 0.5 else []
        return shared + [self.draw.randrange(1000) for _ in range(length)]

    def times(self, count: int) -> int:
        """How often to repeat what a whole run does `count` times: a smoke does a share of it."""
        return max(1, round(self.share * count))

    # ------------------------------------------------------------ faults

    async def strike(self, strike: Strike, *, loses: Iterable[Replica] = ()) -> float:
        """Do a fault; return once the scheduler says that the replicas in `loses` are gone.

        The fault counts once it is verified. Each detection is measured from its instant.
        """
        watches = [asyncio.create_task(self._gone_at(replica)) for replica in loses]
        try:
            # A watch says something once in 0.1 s at most: its first message may not delay what counts.
            await asyncio.sleep(self.draw.uniform(0.12, 0.2))
            at = await strike()
            self.struck(at)
            for watch in watches:
                self.outcome.detection_ms.append((await watch - at) * 1e3)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        return at

    def struck(self, at: float, *, times: int = 1) -> None:
        """A fault has happened, so often, and was seen to."""
        self.outcome.faults_injected += times
        if self.first_fault_at is None:
            self.first_fault_at = at
            ended = [client for client in self.clients.all if (client.history.ended_at or at) < at]
            self.expect(not ended, f"{len(ended)} streams had ended before the fault")

    async def _gone_at(self, replica: Replica) -> float:
        return await self.mesh.view.first_time(
            lambda mesh: not replica.is_served_in(mesh), timeout_s=DETECTION_TIMEOUT_S
        )

    async def kill(self, *processes: ProcessRecord, loses: Iterable[Replica] = ()) -> float:
        """SIGKILL."""
        return await self.strike(lambda: kill(processes), loses=loses)

    async def freeze(self, *processes: ProcessRecord, loses: Iterable[Replica] = ()) -> float:
        """SIGSTOP; `thaw` must follow."""
        self.mesh.frozen.update(processes)
        return await self.strike(lambda: freeze(processes), loses=loses)

    async def thaw(self, *processes: ProcessRecord) -> float:
        """SIGCONT."""
        at = await thaw(processes)
        self.mesh.frozen.difference_update(processes)
        return at

    async def chip_fault(self, replica: Replica, fault: str, *, loses: Iterable[Replica] = ()) -> float:
        """A fault of a worker's hash back end (see plugins.hash.faults) in its next step."""
        return await self.strike(lambda: self._ask_for(replica.worker, fault), loses=loses)

    async def _ask_for(self, worker: str, fault: str) -> float:
        wanted = self.mesh.fault_file(worker)
        taken, written = wanted.with_name(f"{wanted.name}.taken"), wanted.with_name(f"{wanted.name}.new")
        taken.unlink(missing_ok=True)
        written.write_text(fault, encoding="utf-8")
        at = time.monotonic()
        written.rename(wanted)
        try:
            await until(taken.exists, timeout_s=FAULT_TAKEN_TIMEOUT_S, what=f"{worker} has the fault {fault}")
        except TimeoutError as error:
            wanted.unlink(missing_ok=True)
            raise FaultDidNotHappen(str(error)) from error
        return at

    # ------------------------------------------------------------ checking

    def expect(self, holds: bool, problem: str) -> None:
        """A problem of the run unless `holds`."""
        if not holds:
            self.outcome.problems.append(problem)

    def measure(self, figure: str, value: float) -> None:
        """One value of a figure of the scenario's own."""
        self.outcome.figures.setdefault(figure, []).append(value)

    async def until_serving(self, *workers: str, timeout_s: float = 60.0) -> None:
        """Return once these workers take requests in the scheduler's view. Raises TimeoutError."""
        await self.mesh.view.first_time(lambda mesh: ready_workers(mesh) >= set(workers), timeout_s=timeout_s)

    async def stale_results(self) -> float:
        """Results that the present scheduler has ignored, their epoch or step being over."""
        return await read_count(self.mesh.http_address("scheduler"), "chipmesh_stale_step_results_total")

    async def until_moving(self, *, timeout_s: float = 30.0) -> None:
        """Return once every stream has got a token from now on, or has ended. Raises TimeoutError."""

        async def moves(client: Client) -> None:
            await client.until_count(client.count + 1)

        await asyncio.wait_for(asyncio.gather(*(moves(client) for client in self.clients.all)), timeout_s)
