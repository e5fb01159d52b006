"""The table of live requests, and of those that ended a short while ago and can still be resumed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from gateway.generation_spec import RequestKey
from gateway.live_request import LiveRequest
from meshkit.errors import AlreadyExists, NotFound, ResourceExhausted

RETRY_AFTER_S = 1.0


class StreamTable:
    """Requests by owner and id. An id is reserved before its prompt is tokenised, so a refusal costs nothing.
    To one owner another's requests are not there.

    max_live: reserved and live requests together. keep_finished_s: seconds on `clock`, which is monotonic.
    At most `max_live` ended requests are kept, whatever their age.
    """

    def __init__(
        self, *, max_live: int, keep_finished_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_live = max_live
        self._keep_finished_s = keep_finished_s
        self._clock = clock
        self._reserved: dict[RequestKey, asyncio.Event] = {}
        self._live: dict[RequestKey, LiveRequest] = {}
        self._busy: Counter[str] = Counter()
        self._finished: OrderedDict[RequestKey, tuple[float, LiveRequest]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<StreamTable {len(self._live)} live, {len(self._finished)} finished>"

    def __iter__(self) -> Iterator[LiveRequest]:
        """The live requests, as they are now."""
        return iter(list(self._live.values()))

    @property
    def busy_count(self) -> int:
        """Reserved and live requests."""
        return len(self._reserved) + len(self._live)

    def busy_count_of(self, owner: str) -> int:
        """Those of one owner."""
        return self._busy[owner]

    def reserve(self, key: RequestKey) -> None:
        """Take a place and an id.

        Raises:
            AlreadyExists: a live request has the id.
            ResourceExhausted: all places are taken.
        """
        if key in self._reserved or key in self._live:
            raise AlreadyExists(
                f"request_id {key.request_id!r} belongs to a live request; choose another, leave it empty, "
                "or send that request again to follow it",
                field="request_id",
                reason="REQUEST_ID_IN_USE",
            )
        if self.busy_count >= self._max_live:
            raise ResourceExhausted(
                f"{self.busy_count} requests are live at this gateway, the limit is {self._max_live}; "
                f"try again in {RETRY_AFTER_S:g} s",
                reason="TOO_MANY_REQUESTS",
                retry_after_s=RETRY_AFTER_S,
            )
        self._reserved[key] = asyncio.Event()
        self._busy[key.owner] += 1

    def release(self, key: RequestKey) -> None:
        """Give a reserved place back: the request was refused. Idempotent."""
        settled = self._reserved.pop(key, None)
        if settled is not None:
            self._leave(key)
            settled.set()

    async def find_again(self, key: RequestKey) -> LiveRequest | None:
        """The request that another one of the same id goes on with: live, or ended well a short while ago.

        Waits while one of that id is being started. One that failed or was cancelled is begun anew instead.
        """
        while (settled := self._reserved.get(key)) is not None:
            await settled.wait()
        self._drop_expired()
        live = self._live.get(key)
        if live is not None:
            return live
        kept = self._finished.get(key)
        return kept[1] if kept is not None and kept[1].ended_well else None

    def add(self, request: LiveRequest) -> None:
        """Turn a reserved place into a live request."""
        key = request.spec.key
        self._finished.pop(key, None)
        self._live[key] = request
        self._reserved.pop(key).set()

    def retire(self, request: LiveRequest, *, keep: bool) -> None:
        """A live request has ended; keep: it may be resumed for a while. Idempotent."""
        key = request.spec.key
        if self._live.get(key) is request:  # The id may belong to another by now.
            del self._live[key]
            self._leave(key)
            if keep:
                self._finished[key] = (self._clock(), request)
        self._drop_expired()

    def find(self, key: RequestKey) -> LiveRequest:
        """A live request, or one that ended a short while ago.

        Raises:
            NotFound: it is not known here, or not any more.
        """
        self._drop_expired()
        request = self._live.get(key)
        if request is not None:
            return request
        kept = self._finished.get(key)
        if kept is None:
            raise NotFound(
                f"request_id {key.request_id[:200]!r} is not known here (any more); ended requests are kept "
                f"for {self._keep_finished_s:g} s, at the gateway that accepted them; send the request again",
                field="request_id",
                reason="REQUEST_NOT_FOUND",
            )
        return kept[1]

    def find_live(self, key: RequestKey) -> LiveRequest | None:
        """The live request of that id, if its owner has one."""
        return self._live.get(key)

    def _leave(self, key: RequestKey) -> None:
        self._busy[key.owner] -= 1
        if not self._busy[key.owner]:
            del self._busy[key.owner]

    def _drop_expired(self) -> None:
        oldest_allowed = self._clock() - self._keep_finished_s
        while self._finished:
            key, (ended_at, _) = next(iter(self._finished.items()))
            if ended_at > oldest_allowed and len(self._finished) <= self._max_live:
                return
            del self._finished[key]
