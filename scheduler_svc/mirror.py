"""Shadow traffic: a share of a group's requests runs on another group too, is compared, and never served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshkit.errors import InvalidArgument, MeshError
from meshkit.telemetry.logging import get_logger
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.core.placement import WeightedTurns
from scheduler_svc.core.structures import FinishReason
from scheduler_svc.live_request import EventSink, LiveRequest, ReplicaInfo

log = get_logger(__name__)

SubmitCopy = Callable[[LiveRequest, str, EventSink], LiveRequest | None]
"""(request, group, sink): starts a copy from the request's prompt, pinned to the group; None if refused."""


@dataclass
class ShadowCount:
    """What came of the copies. equal_tokens: of `tokens`, those before the first one that differs."""

    mirrored: int = 0
    compared: int = 0
    identical: int = 0
    tokens: int = 0
    equal_tokens: int = 0
    max_logprob_gap: float = 0.0
    failed: int = 0


@dataclass
class Shadow:
    """One source group's mirroring."""

    group: str
    share: float
    count: ShadowCount = field(default_factory=ShadowCount)
    turns: WeightedTurns = field(default_factory=WeightedTurns)

    def is_due(self) -> bool:
        """Whether the next request is copied: every tenth for a share of 0.1, not one in ten by chance."""
        return self.turns.choose({"copy": self.share, "leave": 1 - self.share}) == "copy"


class _Copy:
    """A copy and its original, until both have ended. An EventSink."""

    def __init__(self, mirror: Mirror, shadow: Shadow, source: LiveRequest) -> None:
        self.mirror = mirror
        self.shadow = shadow
        self.source = source
        self.live: LiveRequest | None = None
        self.source_ended = False
        self.ended = False

    def queued(self, live: LiveRequest) -> None:
        """Nobody waits for it."""

    def placed(self, number: int, info: ReplicaInfo, *, cached_tokens: int) -> None:
        """Nobody waits for it."""

    def grew(self, live: LiveRequest) -> None:
        """More to compare; once it has as many as the original needs, it need not go on."""
        self.mirror.check(self)

    def finished(self, number: int, reason: FinishReason) -> None:
        """The copy is complete."""
        self.ended = True
        self.mirror.check(self)

    def failed(self, number: int, error: MeshError) -> None:
        """The copy cannot be compared."""
        self.ended = True
        self.shadow.count.failed += 1
        self.mirror.drop(self)
        log.warning("a mirrored request failed", group=self.shadow.group, reason=error.reason)


class Mirror:
    """All shadows by source group. A RequestObserver of the engine."""

    def __init__(
        self,
        core: MeshCore,
        *,
        submit_copy: SubmitCopy,
        cancel: Callable[[LiveRequest], None],
        on_compared: Callable[[str, int, int], None],
    ) -> None:
        """on_compared(group, equal tokens, tokens): of one copy on the shadow group."""
        self._core = core
        self._submit_copy = submit_copy
        self._cancel = cancel
        self._on_compared = on_compared
        self.shadows: dict[str, Shadow] = {}
        self._copies: dict[LiveRequest, _Copy] = {}
        """By original."""

    def __repr__(self) -> str:
        return f"<Mirror of {len(self.shadows)} groups, {len(self._copies)} copies>"

    def set_shadow(self, *, source: str, shadow: str, share: float) -> None:
        """Mirror a share of `source`'s requests to `shadow` from now on; 0 ends it.

        Raises:
            InvalidArgument: a group that is not there, one group twice, two models, or a share outside
                [0, 1].
        """
        if not 0 <= share <= 1:
            raise InvalidArgument(f"share is {share}; it must be in [0, 1]", field="share")
        groups = {group.name: group for group in self._core.snapshot().groups}
        for field_name, name in (("source_group", source), ("shadow_group", shadow)):
            if name not in groups:
                known = ", ".join(groups) or "none"
                raise InvalidArgument(f"{field_name} is {name!r}; there is: {known}", field=field_name)
        if source == shadow or groups[source].model != groups[shadow].model:
            raise InvalidArgument(
                f"shadow_group is {shadow!r}; it must be another group of model {groups[source].model!r}",
                field="shadow_group",
            )
        if share == 0:
            self.shadows.pop(source, None)
        else:
            self.shadows[source] = Shadow(shadow, share)

    def placed(self, live: LiveRequest, info: ReplicaInfo) -> None:
        """A request runs for the first time: copy it, if its turn has come."""
        shadow = self.shadows.get(info.group)
        if shadow is None or live.core.is_pinned or live.core.output or not shadow.is_due():
            return
        copy = _Copy(self, shadow, live)
        copy.live = self._submit_copy(live, shadow.group, copy)
        if copy.live is None:
            shadow.count.failed += 1
            return
        shadow.count.mirrored += 1
        self._copies[live] = copy

    def ended(self, live: LiveRequest, error: MeshError | None) -> None:
        """An original ended; where it failed there is nothing to compare with."""
        copy = self._copies.get(live)
        if copy is None:
            return
        if error is not None or not live.core.output:
            self.drop(copy)
            return
        copy.source_ended = True
        self.check(copy)

    def check(self, copy: _Copy) -> None:
        """Compare once the original has ended and the copy has as many tokens, or has ended too."""
        if not copy.source_ended or copy.live is None or copy.source not in self._copies:
            return
        served, made = copy.source.core.output, copy.live.core.output
        if not copy.ended and len(made) < len(served):
            return
        equal = _equal_tokens(served, made)
        count = copy.shadow.count
        count.compared += 1
        count.identical += equal == len(served)
        count.tokens += len(served)
        count.equal_tokens += equal
        logprobs = zip(copy.source.logprobs[:equal], copy.live.logprobs[:equal], strict=False)
        gaps = [abs(a - b) for a, b in logprobs]
        count.max_logprob_gap = max([count.max_logprob_gap, *gaps])
        group = copy.shadow.group
        self.drop(copy)
        self._on_compared(group, equal, len(served))

    def drop(self, copy: _Copy) -> None:
        """Forget a copy, and end it where it still runs."""
        self._copies.pop(copy.source, None)
        if copy.live is not None and not copy.ended:
            copy.ended = True
            self._cancel(copy.live)


def _equal_tokens(served: Sequence[int], made: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(served, made, strict=False)):
        if one != other:
            return index
    return min(len(served), len(made))
