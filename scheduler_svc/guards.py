"""Takes a group's traffic away by itself when it leaves its bounds, and says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshkit.errors import Cancelled, InvalidArgument, MeshError, NotFound
from meshkit.telemetry.logging import get_logger
from scheduler_svc.config import GroupConfig
from scheduler_svc.core.guard import Ended, Guard
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.live_request import LiveRequest, ReplicaInfo

log = get_logger(__name__)

_CLIENTS_FAULT = (Cancelled, InvalidArgument, NotFound)


class GroupGuards:
    """The guards of the groups that have bounds. A RequestObserver of the engine.

    set_weights(model, weights): sets the weights of all groups of a model.
    """

    def __init__(
        self,
        core: MeshCore,
        *,
        set_weights: Callable[[str, Mapping[str, float]], None],
        on_rollback: Callable[[str], None],
    ) -> None:
        self._core = core
        self._set_weights = set_weights
        self._on_rollback = on_rollback
        self._guards: dict[str, Guard] = {}
        self.reasons: dict[str, str] = {}
        """Why a group has lost its traffic, by group."""

    def __repr__(self) -> str:
        return (
            f"<GroupGuards of {len(self._guards)} groups, rolled back: {', '.join(self.reasons) or 'none'}>"
        )

    def watch(self, group: GroupConfig) -> None:
        """Watch a group from now on, if it has bounds."""
        if group.guard is not None:
            self._guards[group.name] = Guard(group.guard.bounds())

    def weights_set(self, weights: Mapping[str, float]) -> None:
        """Somebody gave groups weights by hand: those with traffic are judged anew."""
        for name, weight in weights.items():
            if weight > 0 and name in self._guards:
                self._guards[name].reset()
                self.reasons.pop(name, None)

    def placed(self, live: LiveRequest, info: ReplicaInfo) -> None:
        """Nothing to judge yet."""

    def ended(self, live: LiveRequest, error: MeshError | None) -> None:
        """A request ended on its group."""
        guard = self._guards.get(live.core.group)
        if guard is None or live.core.is_pinned or isinstance(error, _CLIENTS_FAULT):
            return
        reason = guard.record_end(
            Ended(failed=error is not None, ttft_s=live.ttft_s, token_gap_s=live.token_gap_s)
        )
        self._roll_back(live.core.group, reason)

    def compared(self, group: str, *, equal_tokens: int, tokens: int) -> None:
        """A mirrored request of the group was compared with what was served."""
        if (guard := self._guards.get(group)) is not None:
            self._roll_back(group, guard.record_comparison(equal_tokens=equal_tokens, tokens=tokens))

    def _roll_back(self, name: str, reason: str) -> None:
        if not reason or name in self.reasons:
            return
        groups = {group.name: group for group in self._core.snapshot().groups}
        model = groups[name].model
        others = {
            each.name: each.weight for each in groups.values() if each.model == model and each.name != name
        }
        self.reasons[name] = reason
        self._on_rollback(name)
        if not any(others.values()):
            log.error("group out of bounds, and no other group takes its traffic", group=name, reason=reason)
            return
        log.error("group out of bounds; its weight is 0 now", group=name, reason=reason)
        self._set_weights(model, {**others, name: 0.0})
