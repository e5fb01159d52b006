"""R9: single messages between the scheduler and those beside it are lost, doubled, or overtaken."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from chaos.client import Client, Clients
from chaos.mesh import Shape
from chaos.message_faults import Fault, Order, read_done, write_orders
from chaos.processes import FaultDidNotHappen, freeze, kill, until
from chaos.report import Target
from chaos.scenario import Inject, Run, scenario
from chaos.view import Replica

FAULT_TIMEOUT_S = 12.0
RECOVERY_TIMEOUT_S = 30.0
FAULTS_PER_RUN = 3
"""Of messages that there are many of."""
MOST_SKIPPED = 20
SHORT_TOKENS = 20
BETWEEN_S = 0.05
LEASE_OVER_S = 1.6
ENDLESS_TOKENS = 30_000
"""Nobody waits for so many: what still runs after its client has left shows."""

messages = scenario(
    "R9",
    "A message from or to the scheduler is lost, doubled or overtaken, or the answer of a call is lost",
    target=Target(),
    # A step whose plan or result is lost and that no other step follows is known by its deadline only.
    shape=Shape(loses_messages=True, scheduler={"step_deadline_floor_s": 1.0}),
    tokens=400,
    full_runs=1000,
    full_streams=8,
)

Trigger = Callable[[Run, Replica], Awaitable[None]]


def order(where: str, fault: Fault, *, kind: str = "", who: str = "", skip: int = 0) -> Order:
    """A new one, see Order."""
    return Order(secrets.token_hex(8), where, fault.value, skip=skip, kind=kind, who=who)


@asynccontextmanager
async def faults_of(run: Run, *orders: Order) -> AsyncIterator[None]:
    """Faults that are asked for before the block; when it is left they have happened, or the run fails."""
    folder = run.mesh.message_faults
    write_orders(folder, *orders)

    def instants() -> dict[str, float]:
        return {done.id: done.at for done in read_done(folder)}

    try:
        yield
        await until(
            lambda: all(each.id in instants() for each in orders),
            timeout_s=FAULT_TIMEOUT_S,
            what=" and ".join(f"{each.fault} of {each.where} {each.kind}" for each in orders),
        )
    except TimeoutError as error:
        raise FaultDidNotHappen(str(error)) from error
    finally:
        write_orders(folder)
    for each in orders:
        run.struck(instants()[each.id])


# ---------------------------------------------------------------- what makes the message come


async def wait_for_it(run: Run, victim: Replica) -> None:
    """It comes by itself, all the time."""
    del run, victim


async def lose_the_lease(run: Run, victim: Replica) -> None:
    """A supervisor that slept registers again."""
    run.mesh.frozen.add(victim.supervisor)
    try:
        await freeze([victim.supervisor])
        await asyncio.sleep(LEASE_OVER_S)
    finally:
        await run.thaw(victim.supervisor)


async def replace_executor(run: Run, victim: Replica) -> None:
    """A supervisor registers its executor again, and then another one in its place."""
    await lose_the_lease(run, victim)
    await run.until_serving(victim.worker)
    await kill([victim.executor])


async def attach_again(run: Run, victim: Replica) -> None:
    """An executor that lost a step is attached again."""
    await run.chip_fault(victim, "out_of_memory")


async def restart_worker(run: Run, victim: Replica) -> None:
    """A worker that ends in order says so; the one after it has its name."""
    code = await run.mesh.terminate(victim.worker)
    run.expect(code == 0, f"{victim.worker} ended with {code} at SIGTERM")
    await run.mesh.start_service(victim.worker)


# ---------------------------------------------------------------- calls

CALLS: dict[str, Trigger] = {
    "heartbeat": wait_for_it,
    "register": lose_the_lease,
    "attach": attach_again,
    "deregister": restart_worker,
}


def _of_call(where: str, fault: Fault, trigger: Trigger) -> Inject:
    async def inject(run: Run) -> None:
        victim = await run.victim()
        # The one that calls is the executor's address for an attach, which only the victim makes anyhow.
        who = "" if where == "attach" else victim.worker
        async with faults_of(run, order(where, fault, who=who)):
            await trigger(run, victim)
        await run.until_serving(*run.mesh.worker_names)

    return inject


# ---------------------------------------------------------------- streams


async def _repeat(run: Run, where: str, fault: Fault, *, kind: str = "") -> None:
    """Some faults of messages that come all the time, each once the streams have got over the one before."""
    for _ in range(FAULTS_PER_RUN):
        async with faults_of(run, order(where, fault, kind=kind, skip=run.draw.randrange(MOST_SKIPPED))):
            pass
        await run.until_serving(*run.mesh.worker_names)
        await run.until_moving()


def _of_steps(where: str, fault: Fault) -> Inject:
    """A result that comes again is ignored; anything else is the end of its epoch."""
    is_ignored = where == "results" and fault is Fault.DUPLICATE

    async def inject(run: Run) -> None:
        async def count() -> float:
            return await run.stale_results() if is_ignored else await _epochs(run)

        before = await count()
        await _repeat(run, where, fault)

        async def are_seen() -> bool:
            return await count() - before >= FAULTS_PER_RUN

        what = "each doubled result is ignored" if is_ignored else "each fault ends an epoch"
        await until(are_seen, timeout_s=RECOVERY_TIMEOUT_S, what=what, poll_s=0.05)
        run.measure("stale_results_ignored" if is_ignored else "new_epochs", await count() - before)

    return inject


async def _epochs(run: Run) -> int:
    """Of all executors together, once all are attached: one more with each attachment."""
    await run.until_serving(*run.mesh.worker_names)
    replicas = await run.mesh.view.replicas()
    return sum(replica.epoch for replica in replicas) if len(replicas) == run.mesh.shape.workers else 0


def _of_events(kind: str, fault: Fault) -> Inject:
    """Events of streams that run, or the first or last ones of streams that begin meanwhile."""

    async def inject(run: Run) -> None:
        if kind == "tokens":
            await _repeat(run, "events", fault, kind=kind)
            return
        for _ in range(FAULTS_PER_RUN):
            async with faults_of(run, order("events", fault, kind=kind)):
                client = run.clients.start(run.prompt(), tokens=SHORT_TOKENS)
            await _until_ended(client)

    return inject


def _of_submissions(fault: Fault) -> Inject:
    async def inject(run: Run) -> None:
        async with faults_of(run, order("commands", fault, kind="submit")):
            # Two, and not in one message: only the second can come before the first.
            first = run.clients.start(run.prompt(), tokens=SHORT_TOKENS)
            await asyncio.sleep(BETWEEN_S)
            second = run.clients.start(run.prompt(), tokens=SHORT_TOKENS)
        await _until_ended(first, second)

    return inject


def _of_greetings(where: str, kind: str, fault: Fault) -> Inject:
    """Of a session that is opened in place of one that lost a message."""

    async def inject(run: Run) -> None:
        async with faults_of(run, order("events", Fault.DROP, kind="tokens"), order(where, fault, kind=kind)):
            pass
        await run.until_moving()

    return inject


async def _until_ended(*clients: Client) -> None:
    ends = (client.until_count(SHORT_TOKENS) for client in clients)
    await asyncio.wait_for(asyncio.gather(*ends), RECOVERY_TIMEOUT_S)


def _of_cancels(fault: Fault) -> Inject:
    """Of clients that leave: nobody may go on working for them."""

    async def inject(run: Run) -> None:
        async with faults_of(run, order("commands", fault, kind="cancel")), leavers(run, 2) as clients:
            for client in clients:
                await _leave(client)
                await asyncio.sleep(BETWEEN_S)

    return inject


def _of_submissions_overtaken_by_their_cancel() -> Inject:
    async def inject(run: Run) -> None:
        overtaken = order("commands", Fault.REORDER, kind="submit")
        async with faults_of(run, overtaken), leavers(run, 0) as clients:
            client = clients.start(run)
            await asyncio.sleep(2 * BETWEEN_S)
            await _leave(client)

    return inject


class Leavers(list[Client]):
    """Clients whose streams would go on for minutes."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.clients = Clients([run.mesh.address(name) for name in run.mesh.gateway_names])

    def start(self, run: Run) -> Client:
        """One more."""
        self.append(self.clients.start(run.prompt(), tokens=ENDLESS_TOKENS))
        return self[-1]


@asynccontextmanager
async def leavers(run: Run, count: int) -> AsyncIterator[Leavers]:
    """So many that have a token each."""
    all_of_them = Leavers(run)
    try:
        for _ in range(count):
            all_of_them.start(run)
        await asyncio.gather(*(client.until_count(1) for client in all_of_them))
        yield all_of_them
    finally:
        await all_of_them.clients.close()


async def _leave(client: Client) -> None:
    assert client.task is not None
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)


# ---------------------------------------------------------------- variants

OF_STREAMS = (Fault.DROP, Fault.DUPLICATE, Fault.REORDER)
OF_CALLS = (*OF_STREAMS, Fault.LOSE_ANSWER)

for _where, _trigger in CALLS.items():
    for _fault in OF_CALLS:
        messages.variant(f"{_where}: {_fault.value}")(_of_call(_where, _fault, _trigger))
messages.variant("register: late copy")(_of_call("register", Fault.LATE_COPY, replace_executor))
for _fault in OF_STREAMS:
    messages.variant(f"plan: {_fault.value}")(_of_steps("plans", _fault))
    messages.variant(f"result: {_fault.value}")(_of_steps("results", _fault))
    messages.variant(f"tokens: {_fault.value}")(_of_events("tokens", _fault))
    messages.variant(f"queued: {_fault.value}")(_of_events("queued", _fault))
    messages.variant(f"finished: {_fault.value}")(_of_events("finished", _fault))
    messages.variant(f"submit: {_fault.value}")(_of_submissions(_fault))
    messages.variant(f"cancel: {_fault.value}")(_of_cancels(_fault))
    messages.variant(f"welcome: {_fault.value}")(_of_greetings("events", "welcome", _fault))
for _fault in (Fault.DROP, Fault.DUPLICATE):  # Nothing follows a hello before it is answered.
    messages.variant(f"hello: {_fault.value}")(_of_greetings("commands", "hello", _fault))
messages.variant("submit: after its cancel")(_of_submissions_overtaken_by_their_cancel())
