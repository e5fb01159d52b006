"""The table of live requests, and of those that ended a short while ago and can still be resumed."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from gateway.generation_spec import RequestKey
from gateway.live_request import LiveRequest
from gateway.shared_room import SharedRoom
from meshkit.drain_rate import DrainRate
from meshkit.errors import AlreadyExists, NotFound, ResourceExhausted

NO_LIMIT = 1 << 62


class StreamTable:
    """Requests by owner and id. An id is reserved before its prompt is tokenised, so a refusal costs nothing.
    To one owner another's requests are not there.

    max_live: reserved and live requests together. max_prompt_tokens: of all live ones, what the mesh has to
    read. Both are shared fairly among owners (shared_room.py). keep_finished_s: seconds on `clock`, which is
    monotonic. At most `max_live` ended requests are kept, whatever their age.
    """

    def __init__(
        self,
        *,
        max_live: int,
        keep_finished_s: float,
        max_prompt_tokens: int = NO_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_live = max_live
        self._places = SharedRoom(max_live)
        self._prompts = SharedRoom(max_prompt_tokens)
        self._places_drain = DrainRate(now=clock())
        self._prompts_drain = DrainRate(now=clock())
        self._keep_finished_s = keep_finished_s
        self._clock = clock
        self._reserved: dict[RequestKey, asyncio.Event] = {}
        self._live: dict[RequestKey, LiveRequest] = {}
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
        return self._places.held_by(owner)

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
        if not self._places.has_room(key.owner, 1):
            raise _full("requests", self._places, self._places_drain.refuse(1, self._clock()))
        if not self._places.used:
            self._places_drain.begin(self._clock())
        self._reserved[key] = asyncio.Event()
        self._places.take(key.owner, 1)

    def check_prompt(self, owner: str, tokens: int) -> None:
        """Raise ResourceExhausted where a prompt of so many tokens has no room beside the live ones."""
        if not self._prompts.has_room(owner, tokens):
            raise _full("prompt_tokens", self._prompts, self._prompts_drain.refuse(tokens, self._clock()))

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
        if not self._prompts.used:
            self._prompts_drain.begin(self._clock())
        self._prompts.take(key.owner, request.prompt_tokens)
        self._live[key] = request
        self._reserved.pop(key).set()

    def retire(self, request: LiveRequest, *, keep: bool) -> None:
        """A live request has ended; keep: it may be resumed for a while. Idempotent."""
        key = request.spec.key
        if self._live.get(key) is request:  # The id may belong to another by now.
            del self._live[key]
            self._leave(key)
            self._prompts.give_back(key.owner, request.prompt_tokens)
            self._prompts_drain.left(request.prompt_tokens, self._clock())
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
        self._places.give_back(key.owner, 1)
        self._places_drain.left(1, self._clock())

    def _drop_expired(self) -> None:
        oldest_allowed = self._clock() - self._keep_finished_s
        while self._finished:
            key, (ended_at, _) = next(iter(self._finished.items()))
            if ended_at > oldest_allowed and len(self._finished) <= self._max_live:
                return
            del self._finished[key]


def _full(what: str, room: SharedRoom, retry_after_s: float) -> ResourceExhausted:
    return ResourceExhausted(
        f"{room.used} {what.replace('_', ' ')} are live at this gateway, the limit is {room.limit} "
        f"(max_live_{what}); try again in {retry_after_s:.3g} s",
        reason="TOO_MANY_REQUESTS",
        retry_after_s=retry_after_s,
        bound=f"max_live_{what}",
        limit=room.limit,
    )
