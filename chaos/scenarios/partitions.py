"""R7: the network between two services fails while both live: cut, cut one way, slow, or reset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from chaos.links import executor_link
from chaos.mesh import Shape
from chaos.processes import FaultDidNotHappen, until
from chaos.proxy import BOTH, Direction, Effects, Proxy
from chaos.report import Target
from chaos.scenario import Inject, Run, scenario
from chaos.view import Replica

EFFECT_TIMEOUT_S = 5.0
SHORT_S = (0.2, 0.45)
"""Within the lease (1 s) and within the time that a ping may take (1 s)."""
LONG_S = (2.0, 5.0)
DELAY_S = (0.0, 0.12)

partitions = scenario(
    "R7",
    "The scheduler's link to a gateway, supervisor, executor or worker is cut, cut one way, slow, or reset",
    target=Target(),
    shape=Shape(has_proxies=True),
    tokens=500,
    full_runs=240,
)


@dataclass(frozen=True)
class Link:
    """What a run harms: proxies, and the replica that is lost where they are cut for long."""

    proxies: tuple[Proxy, ...]
    replica: Replica | None

    @property
    def effects(self) -> list[Effects]:
        """Of each proxy."""
        return [proxy.effects for proxy in self.proxies]


async def gateway_link(run: Run) -> Link:
    """All streams are on it."""
    return Link((run.mesh.links[run.draw.choice(run.mesh.gateway_names)],), None)


async def supervisor_link(run: Run) -> Link:
    """Heartbeats are on it."""
    victim = await run.victim()
    return Link((run.mesh.links[victim.worker],), victim)


async def steps_link(run: Run) -> Link:
    """Plans and results are on it."""
    victim = await run.victim()
    return Link((run.mesh.links[executor_link(victim.worker)],), victim)


async def worker_links(run: Run) -> Link:
    """A whole worker, as where its machine is cut off."""
    victim = await run.victim()
    return Link((run.mesh.links[victim.worker], run.mesh.links[executor_link(victim.worker)]), victim)


async def cut(
    run: Run, link: Link, *, directions: tuple[Direction, ...], lasts_s: tuple[float, float]
) -> None:
    """Nothing passes, then all that was held does; who has given up meanwhile begins anew."""
    await _do_to(
        run,
        link,
        lambda proxy: proxy.cut(*directions),
        lambda effects: any(effects.held_bytes[each] for each in directions),
        lasts_s=lasts_s,
        lost=[link.replica] if link.replica is not None and lasts_s == LONG_S else [],
    )
    run.measure("bytes_held", sum(sum(effects.held_bytes.values()) for effects in link.effects))


async def slow_down(run: Run, link: Link) -> None:
    """Late and in order: nobody needs to notice."""
    await _do_to(run, link, lambda proxy: proxy.delay(*DELAY_S), lambda effects: effects.delayed_chunks > 1)
    run.measure("delayed_chunks", sum(effects.delayed_chunks for effects in link.effects))


async def reset(run: Run, link: Link) -> None:
    """Connections end at once, and so do those that are made in their place for a while."""
    await _do_to(run, link, Proxy.reset, lambda effects: effects.reset_connections > 0)
    run.measure("connections_reset", sum(effects.reset_connections for effects in link.effects))


async def _do_to(
    run: Run,
    link: Link,
    act: Callable[[Proxy], None],
    shows: Callable[[Effects], bool],
    *,
    lasts_s: tuple[float, float] = LONG_S,
    lost: Sequence[Replica] = (),
) -> None:
    """Do it to every proxy until its effect was seen on each, and for a time by chance; then heal them."""

    async def strike() -> float:
        at = time.monotonic()
        for proxy in link.proxies:
            act(proxy)
        try:
            await until(lambda: all(map(shows, link.effects)), timeout_s=EFFECT_TIMEOUT_S, what="it shows")
        except TimeoutError as error:
            raise FaultDidNotHappen(f"no effect on the traffic of {link.proxies}") from error
        return at

    try:
        at = await run.strike(strike, loses=lost)
        await asyncio.sleep(max(0.0, at + run.draw.uniform(*lasts_s) - time.monotonic()))
    finally:
        for proxy in link.proxies:
            proxy.heal()
    await _whole_again(run, lost)


async def _whole_again(run: Run, lost: Sequence[Replica]) -> None:
    """All workers serve; one that was lost is no longer what it was: nobody takes its old tokens."""
    at = time.monotonic()
    await run.until_serving(*run.mesh.worker_names)
    run.measure("healed_ms", (time.monotonic() - at) * 1e3)
    now = {replica.worker: replica for replica in await run.mesh.view.replicas()}
    for before in lost:
        after = now[before.worker]
        run.expect(
            after.instance_id != before.instance_id or after.epoch > before.epoch,
            f"{before.worker} is back in epoch {after.epoch}, which was over",
        )


LINKS: dict[str, Callable[[Run], Awaitable[Link]]] = {
    "gateway-scheduler": gateway_link,
    "supervisor-scheduler": supervisor_link,
    "scheduler-executor": steps_link,
    "scheduler-worker": worker_links,
}
CUTS = {
    "cut": BOTH,
    "cut one way (to server)": (Direction.TO_SERVER,),
    "cut one way (to client)": (Direction.TO_CLIENT,),
}
Harm = Callable[[Run, Link], Awaitable[None]]


def _harms() -> dict[str, Harm]:
    harms: dict[str, Harm] = {"slow": slow_down, "reset": reset}
    for name, directions in CUTS.items():
        harms[f"{name}, short"] = partial(cut, directions=directions, lasts_s=SHORT_S)
        harms[f"{name}, long"] = partial(cut, directions=directions, lasts_s=LONG_S)
    return harms


def _injection(choose: Callable[[Run], Awaitable[Link]], harm: Harm) -> Inject:
    async def inject(run: Run) -> None:
        before = await run.stale_results()
        await harm(run, await choose(run))
        run.measure("stale_results_ignored", await run.stale_results() - before)

    return inject


for _link, _choose in LINKS.items():
    for _name, _harm in _harms().items():
        partitions.variant(f"{_link}: {_name}")(_injection(_choose, _harm))
