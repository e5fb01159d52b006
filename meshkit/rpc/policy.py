"""Who may call what: one table. A method that does not stand in it is refused to everybody."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshkit.errors import PermissionDenied


class Role(str, enum.Enum):
    """What a peer is to a listener.

    gateway, scheduler, worker, operator: as its certificate says. client: anyone at a gateway's public
    listener. local: anyone at a listener without certificates, which only this host can reach.
    """

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    OPERATOR = "operator"
    CLIENT = "client"
    LOCAL = "local"


CERTIFIED = (Role.GATEWAY, Role.SCHEDULER, Role.WORKER, Role.OPERATOR)
"""Roles that a certificate can give."""

_EVERYBODY = frozenset(Role)
_WORKER = frozenset({Role.WORKER})
# A scheduler's own certificate may administer it: whoever holds that key is the scheduler anyway, and an
# operator inside of its container then needs no other one.
_OPERATOR = frozenset({Role.OPERATOR, Role.SCHEDULER})


def _methods(service: str, names: str, roles: frozenset[Role]) -> dict[str, frozenset[Role]]:
    return {f"/{service}/{name}": roles for name in names.split()}


_DEVICE = "chipmesh.device.v1alpha1"
_SCHEDULER = "chipmesh.scheduler.v1alpha1"

POLICY: Mapping[str, frozenset[Role]] = MappingProxyType({
    **_methods(
        "chipmesh.inference.v1alpha1.InferenceService",
        "Generate ResumeGeneration CancelGeneration ListModels Tokenize",
        frozenset({Role.CLIENT}),
    ),
    **_methods(
        "sglang.grpc.scheduler.SglangScheduler",
        "Generate Embed HealthCheck Abort GetModelInfo GetServerInfo GetLoads FlushCache "
        "StartProfile StopProfile GetTokenizer SubscribeKvEvents "
        "LoadLoRAAdapter UnloadLoRAAdapter ListLoadedLoRAAdapters",
        frozenset({Role.CLIENT}),
    ),
    **_methods(f"{_SCHEDULER}.SessionService", "OpenSession", frozenset({Role.GATEWAY})),
    **_methods(f"{_SCHEDULER}.WorkerRegistryService", "Register Heartbeat Deregister", _WORKER),
    **_methods(
        f"{_SCHEDULER}.AdminService",
        "GetMesh WatchMesh SetTraffic SwapChip DrainWorker FlushCache SetGroup SetShadow SubscribeKvEvents "
        "Profile",
        _OPERATOR,
    ),
    # An executor obeys its own supervisor, and the scheduler in the calls that serve requests; an operator
    # may look.
    **_methods(
        f"{_DEVICE}.PluginService", "GetPluginInfo GetCapabilities Probe", _WORKER | _OPERATOR
    ),
    **_methods(f"{_DEVICE}.ExecutionService", "Attach ExecuteSteps", frozenset({Role.SCHEDULER})),
    **_methods(f"{_DEVICE}.ExecutionService", "LoadModel AllocateKvCache UnloadModel", _WORKER),
    # Ranks of a set are executors of one worker, so they bear one name.
    **_methods(f"{_DEVICE}.ExecutionService", "Follow", _WORKER),
    # Asked by an operator of the scheduler, which can reach every executor.
    **_methods(f"{_DEVICE}.ExecutionService", "Profile", _WORKER | frozenset({Role.SCHEDULER})),
    **_methods(
        f"{_DEVICE}.DeviceService",
        "CreateStream DestroyStream RecordEvent WaitEvent Synchronize SelfTest",
        _WORKER,
    ),
    **_methods(f"{_DEVICE}.DeviceService", "ListDevices GetDevice", _WORKER | _OPERATOR),
    **_methods(f"{_DEVICE}.MemoryService", "Allocate Free Copy GetStats", _WORKER),
    **_methods(f"{_DEVICE}.OperatorService", "RunOperator", _WORKER),
    **_methods(
        f"{_DEVICE}.CollectiveService", "InitGroup RunCollective GetTopology DestroyGroup", _WORKER
    ),
    **_methods("grpc.health.v1.Health", "Check Watch List", _EVERYBODY),
    # Offered only where a configuration says so.
    **_methods("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", _EVERYBODY),
})  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """The other end of a call. name: its own among those of its role; "" where nothing says so."""

    role: Role
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {self.name!r}" if self.name else self.role.value

    def require_name(self, name: str, *, field: str) -> None:
        """Refuse a certificate that speaks for somebody else of its role. `field` holds `name`.

        Raises:
            PermissionDenied: the peer has a certificate, and its name is another one.
        """
        if self.role in CERTIFIED and self.name != name:
            raise PermissionDenied(
                f"{field} is {name!r}, but the certificate is that of {self}; a service speaks for itself "
                "only: give it a certificate of its own name",
                field=field,
                reason="WRONG_NAME",
            )


LOCAL = Peer(Role.LOCAL)


@dataclass(frozen=True)
class Access:
    """Who may call a listener.

    everyone: the role of all its peers; None: as certificates say, or local where the listener asks for none.
    names: roles of which only one peer may call, by its name.
    """

    everyone: Role | None = None
    names: Mapping[Role, str] = field(default_factory=dict)
    policy: Mapping[str, frozenset[Role]] = field(default_factory=lambda: POLICY)

    def check(self, peer: Peer, method: str) -> None:
        """Raises PermissionDenied unless `peer` may call `method` ("/package.Service/Method")."""
        allowed = self.policy.get(method, frozenset())
        # What any role may do, a process of this host may: it could read the keys, too.
        if not allowed or (peer.role is not Role.LOCAL and peer.role not in allowed):
            names = ", ".join(sorted(role.value for role in allowed & set(CERTIFIED))) or "nobody"
            raise PermissionDenied(
                f"{method} may be called by: {names}; this peer is: {peer}", reason="ROLE_NOT_ALLOWED"
            )
        if peer.role in self.names:
            peer.require_name(self.names[peer.role], field="certificate")
