"""Partitions and lost messages harm no client, and those faults are what they say."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import chaos.scenarios  # noqa: F401 - defines the scenarios
from chaos.message_faults import Fault, FaultDesk, Lane, Order, read_done, write_orders
from chaos.proxy import BOTH, Direction, Proxy
from chaos.runner import Plan, run_on
from chaos.scenario import SCENARIOS, Run
from chaos.scenarios.messages import faults_of, order
from tests.support.chaos_meshes import NO_HARM, Meshes, harms

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

STREAMS = 8
TOKENS = 300
# Marked ones: scripts/nightly.sh. Of each link and each kind of fault one is in every run.
PARTITIONS = (
    pytest.param("gateway-scheduler: cut, long", marks=pytest.mark.nightly),
    "supervisor-scheduler: cut one way (to server), long",
    "scheduler-executor: reset",
    pytest.param("scheduler-executor: cut one way (to client), long", marks=pytest.mark.nightly),
)
MESSAGES = (
    "attach: duplicate",
    "plan: drop",
    "result: reorder",
    "tokens: drop",
    "submit: after its cancel",
    *(
        pytest.param(each, marks=pytest.mark.nightly)
        for each in (
            "register: reorder",
            "deregister: reorder",
            "result: drop",
            "submit: drop",
            "cancel: drop",
        )
    ),
)

# ---------------------------------------------------------------- scenarios


async def harms_nobody(meshes: Meshes, id_: str, variant: str) -> None:
    scenario = dataclasses.replace(
        SCENARIOS[id_], tokens=TOKENS, variants={variant: SCENARIOS[id_].variants[variant]}
    )
    report = await run_on(await meshes.of(scenario.shape), scenario, Plan(runs=1, streams=STREAMS, seed=1))
    assert report["problems"] == []
    assert harms(report) == NO_HARM
    assert report["faults_injected"] >= 1


@pytest.mark.parametrize("variant", PARTITIONS)
async def test_a_partition_harms_no_client(meshes: Meshes, variant: str) -> None:
    await harms_nobody(meshes, "R7", variant)


@pytest.mark.parametrize("variant", MESSAGES)
async def test_a_message_fault_harms_no_client(meshes: Meshes, variant: str) -> None:
    await harms_nobody(meshes, "R9", variant)


async def test_a_fault_whose_message_never_comes_fails_the_run(
    meshes: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos.scenarios.messages.FAULT_TIMEOUT_S", 0.3)

    async def ask_in_vain(run: Run) -> None:
        async with faults_of(run, order("register", Fault.DROP)):
            pass

    planted = dataclasses.replace(SCENARIOS["R9"], tokens=60, variants={"only": ask_in_vain})
    report = await run_on(await meshes.of(planted.shape), planted, Plan(runs=1, streams=2, seed=1))
    assert any("fault did not happen" in problem for problem in report["problems"])
    assert (report["faults_injected"], report["passed"]) == (0, False)


# ---------------------------------------------------------------- the proxy


class Echo:
    """A server that sends back what it gets, and a connection to it through a proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.got = bytearray()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.proxy.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            while data := await reader.read(1000):
                made.got += data
                writer.write(data)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    made = Echo(Proxy(f"{host}:{port}"))
    await made.proxy.open()
    yield made
    await made.proxy.close()
    server.close()


async def comes(reader: asyncio.StreamReader, data: bytes) -> bool:
    """Whether that comes; False after a while without it."""
    try:
        return await asyncio.wait_for(reader.readexactly(len(data)), 0.15) == data
    except asyncio.TimeoutError:
        return False


@pytest.mark.parametrize("direction", BOTH)
async def test_a_cut_holds_what_goes_its_way_until_it_is_healed(echo: Echo, direction: Direction) -> None:
    reader, writer = await echo.connect()
    writer.write(b"before")
    assert await comes(reader, b"before")
    echo.proxy.cut(direction)
    writer.write(b"after")
    assert not await comes(reader, b"after")
    assert (bytes(echo.got) == b"before") is (direction is Direction.TO_SERVER)
    assert echo.proxy.effects.held_bytes[direction] == 5
    echo.proxy.heal()
    assert await comes(reader, b"after")
    writer.close()


async def test_a_connection_made_during_a_cut_is_one_when_it_is_healed(echo: Echo) -> None:
    echo.proxy.cut(*BOTH)
    reader, writer = await echo.connect()
    writer.write(b"hello")
    assert not await comes(reader, b"hello")
    assert echo.proxy.effects.held_connections == 1
    echo.proxy.heal()
    assert await comes(reader, b"hello")
    writer.close()


async def test_a_reset_ends_all_connections_and_new_ones_until_it_is_healed(echo: Echo) -> None:
    reader, writer = await echo.connect()
    writer.write(b"x")
    assert await comes(reader, b"x")
    echo.proxy.reset()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    later, also = await echo.connect()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await later.readexactly(1)
    assert echo.proxy.effects.reset_connections == 2
    echo.proxy.heal()
    reader, last = await echo.connect()
    last.write(b"y")
    assert await comes(reader, b"y")
    for each in (writer, also, last):
        each.close()


async def test_a_delay_keeps_the_order_and_is_counted(echo: Echo) -> None:
    reader, writer = await echo.connect()
    echo.proxy.delay(0.001, 0.002)
    for number in range(20):
        writer.write(bytes([number]))
        await writer.drain()
    assert await asyncio.wait_for(reader.readexactly(20), 5) == bytes(range(20))
    assert echo.proxy.effects.delayed_chunks >= 2
    writer.close()


# ---------------------------------------------------------------- message faults


@pytest.fixture
def desk(tmp_path: Path) -> FaultDesk:
    return FaultDesk(tmp_path, clock=lambda: 7.5)


def lane_after(tmp_path: Path, desk: FaultDesk, *orders: Order) -> list[str]:
    """What comes of a, b, c and d."""
    write_orders(tmp_path, *orders)
    lane: Lane[str] = Lane(desk, "here", lambda message: {message})
    return [passed for message in "abcd" for passed in lane.pass_on(message)]


@pytest.mark.parametrize(
    ("fault", "left"), [(Fault.DROP, "acd"), (Fault.DUPLICATE, "abbcd"), (Fault.REORDER, "acbd")]
)
def test_each_fault_is_done_to_one_message_and_counted(
    tmp_path: Path, desk: FaultDesk, fault: Fault, left: str
) -> None:
    assert "".join(lane_after(tmp_path, desk, Order("one", "here", fault.value, skip=1))) == left
    assert [(done.id, done.at) for done in read_done(tmp_path)] == [("one", 7.5)]


def test_a_fault_is_for_its_place_and_its_kind_of_message_only(tmp_path: Path, desk: FaultDesk) -> None:
    assert lane_after(tmp_path, desk, Order("one", "elsewhere", "drop")) == list("abcd")
    assert read_done(tmp_path) == []
    assert lane_after(tmp_path, desk, Order("two", "here", "drop", kind="c")) == list("abd")
    assert [done.id for done in read_done(tmp_path)] == ["two"]


def test_several_orders_do_not_wait_for_each_other(tmp_path: Path, desk: FaultDesk) -> None:
    orders = [Order(f"of {kind}", "here", "drop", kind=kind) for kind in "dbz"]
    assert lane_after(tmp_path, desk, *orders) == list("ac")
    assert [done.id for done in read_done(tmp_path)] == ["of b", "of d"]


def test_a_message_that_nothing_follows_was_not_overtaken(tmp_path: Path, desk: FaultDesk) -> None:
    assert lane_after(tmp_path, desk, Order("one", "here", "reorder", skip=3)) == list("abc")
    assert read_done(tmp_path) == []


def test_an_order_that_was_taken_back_is_not_carried_out(tmp_path: Path, desk: FaultDesk) -> None:
    write_orders(tmp_path, Order("one", "here", "drop", skip=1))
    lane: Lane[str] = Lane(desk, "here", lambda message: ())
    assert lane.pass_on("a") == ["a"]
    write_orders(tmp_path)
    assert lane.pass_on("b") == ["b"]
    assert read_done(tmp_path) == []
