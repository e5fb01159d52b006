"""The groups: which model each serves, and the ceilings that apply to a replica's own report."""

from __future__ import annotations

from typing import Any

from chipmesh.device.v1alpha1 import execution_pb2
from chipmesh.scheduler.v1alpha1 import registry_pb2
from meshkit.config import parse_config
from meshkit.errors import InvalidArgument, NotFound
from scheduler_svc.config import DEFAULT_CHUNK_TOKENS, GroupConfig, SchedulerConfig
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.core.structures import ReplicaLimits


class GroupTable:
    """Groups of the configuration, and those that workers make by joining them."""

    def __init__(self, core: MeshCore, config: SchedulerConfig) -> None:
        self._core = core
        self._config = config
        self._groups: dict[str, GroupConfig] = {}
        for group in config.groups:
            self._add(group)

    def _add(self, group: GroupConfig) -> None:
        self._groups[group.name] = group
        self._core.configure_group(
            group.name, model=group.model, weight=group.weight, policy=group.schedule_policy
        )

    def join(self, name: str, *, model: str) -> None:
        """A replica of `model` joins; a group that nobody configured is made with weight 1.

        Raises:
            InvalidArgument: the group serves another model, or only configured groups may be joined.
        """
        group = self._groups.get(name)
        if group is None:
            if self._config.strict_groups:
                raise InvalidArgument(
                    f"group {name!r} is not configured; there is: {', '.join(self._groups) or 'none'}",
                    field="group",
                    reason="UNKNOWN_GROUP",
                )
            self._add(GroupConfig(name=name, model=model))
        elif group.model != model:
            raise InvalidArgument(
                f"model is {model!r}, but group {name!r} serves {group.model!r}; join another group",
                field="model",
                reason="MODEL_MISMATCH",
            )

    def config(self, name: str) -> GroupConfig:
        """The settings of a group that was configured or joined. Raises KeyError for another one."""
        return self._groups[name]

    def change(self, name: str, **settings: Any) -> None:
        """Change settings of a group; None takes a ceiling away.

        Raises:
            NotFound: there is no such group.
            InvalidArgument: a value out of range, named.
        """
        group = self._groups.get(name)
        if group is None:
            raise NotFound(
                f"group {name!r} is not in the mesh; there is: {', '.join(self._groups) or 'none'}",
                field="group",
                reason="UNKNOWN_GROUP",
            )
        changed = {**group.model_dump(), **settings}
        self._groups[name] = parse_config(GroupConfig, changed, source=f"group {name!r}")

    def limits(
        self, registration: registry_pb2.RegisterRequest, attached: execution_pb2.AttachResponse
    ) -> ReplicaLimits:
        """What the executor said at Attach, under the ceilings of group and scheduler."""
        group = self._groups[registration.group]
        chunk = registration.chunk_tokens if registration.HasField("chunk_tokens") else None
        return ReplicaLimits(
            page_count=attached.page_count,
            page_size=attached.page_size_tokens,
            max_running_requests=_least(
                attached.max_slots, group.max_running_requests, self._config.max_running_requests
            ),
            chunk_tokens=_least(
                chunk, group.chunked_prefill_size, self._config.chunked_prefill_size,
                default=DEFAULT_CHUNK_TOKENS,
            ),
            context_tokens=attached.model.context_tokens,
            takes_constraints=not attached.model.no_constraints_reason,
            enable_radix_cache=self._config.enable_radix_cache,
            enable_mixed_chunk=self._config.enable_mixed_chunk,
            min_cached_tokens=self._config.radix_attention_min_len,
            eviction_policy=self._config.radix_eviction_policy,
            priority_preemption=self._config.enable_priority_preemption,
            preemption_threshold=self._config.priority_preemption_threshold,
        )  # fmt: skip


def _least(*ceilings: int | None, default: int = 1) -> int:
    """The smallest of those given; `default` where none is."""
    return min((ceiling for ceiling in ceilings if ceiling is not None), default=default)
