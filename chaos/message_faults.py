"""Faults of single messages inside a service: what to do with which message, ordered and counted by file.

The harness writes an order; the service takes it at the first message that it fits, and writes down every
fault that has truly happened. Nothing here knows gRPC.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

ORDERS, DONE = "orders.json", "done.jsonl"


class Fault(str, enum.Enum):
    """DROP: the message never arrives. LOSE_ANSWER: of a call it arrives, and its answer does not.
    DUPLICATE: it arrives twice. REORDER: it arrives after the next one (a call that waits so long has failed
    for its caller meanwhile). LATE_COPY: of a call, it arrives, and once more after the next of its kind.
    """

    DROP = "drop"
    LOSE_ANSWER = "lose answer"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    LATE_COPY = "late copy"


@dataclass(frozen=True)
class Order:
    """One fault. id: never used before, also not by a run that left its files in the same folder.

    where: the messages that it is for. skip: so many of them pass first.
    kind: only messages that carry this kind of command or event; "": any. who: only of this worker; "": any.
    """

    id: str
    where: str
    fault: str
    skip: int = 0
    kind: str = ""
    who: str = ""


@dataclass(frozen=True)
class Done:
    """A fault that has happened. at: monotonic seconds."""

    id: str
    at: float


def write_orders(folder: Path, *orders: Order) -> None:
    """Ask the service that looks into `folder` for faults, in place of all that it was asked for before."""
    written = folder / f"{ORDERS}.new"
    written.write_text(json.dumps([dataclasses.asdict(order) for order in orders]), encoding="utf-8")
    os.replace(written, folder / ORDERS)


def read_done(folder: Path) -> list[Done]:
    """All that has happened so far."""
    try:
        lines = (folder / DONE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [Done(**json.loads(line)) for line in lines]


class FaultDesk:
    """In the service: gives each message its fault, and keeps the account."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._orders: list[Order] = []

    def __repr__(self) -> str:
        return f"<FaultDesk {self._orders}>"

    def take(self, where: str, *, kinds: Collection[str] = (), who: str = "") -> Order | None:
        """The order for this message, or None; to be asked once for each, before it is passed on."""
        self._look()
        for index, order in enumerate(self._orders):
            if order.where != where or order.kind not in ("", *kinds) or order.who not in ("", who):
                continue
            if not order.skip:
                return self._orders.pop(index)
            self._orders[index] = dataclasses.replace(order, skip=order.skip - 1)
            return None
        return None

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def happened(self, order: Order, *, at: float | None = None) -> None:
        """The fault of that order is done. at: when it began, where that was not now."""
        instant = self._clock() if at is None else at
        with (self._folder / DONE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": order.id, "at": instant}) + "\n")

    def _look(self) -> None:
        path = self._folder / ORDERS
        if path.exists():  # It goes nowhere but here: it is only ever replaced, in one piece.
            self._orders = [Order(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
            path.unlink()


class Lane(Generic[T]):
    """One direction of one stream: what is passed on in place of each message.

    kinds_of: the kinds of commands or events in a message.
    """

    def __init__(self, desk: FaultDesk, where: str, kinds_of: Callable[[T], Collection[str]]) -> None:
        self._desk = desk
        self._where = where
        self._kinds_of = kinds_of
        self._held: tuple[Order, T, float] | None = None

    def pass_on(self, message: T) -> list[T]:
        """What goes on now that this one came: mostly itself."""
        if self._held is not None:
            overtaken, held, since = self._held
            self._held = None
            self._desk.happened(overtaken, at=since)
            return [message, held]
        order = self._desk.take(self._where, kinds=self._kinds_of(message))
        if order is None:
            return [message]
        if order.fault == Fault.REORDER:
            self._held = (order, message, self._desk.now())
            return []
        self._desk.happened(order)
        return [message, message] if order.fault == Fault.DUPLICATE else []


class Inbox(Generic[T]):
    """What a lane let through and nobody has read yet."""

    def __init__(self, lane: Lane[T]) -> None:
        self._lane = lane
        self._ready: deque[T] = deque()

    async def read(self, receive: Callable[[], Any], is_end: Callable[[Any], bool]) -> Any:
        """The next message, or what `receive` gave at the end; a message that is held then is lost."""
        while not self._ready:
            message = await receive()
            if is_end(message):
                return message
            self._ready.extend(self._lane.pass_on(message))
        return self._ready.popleft()
