"""WorkerRegistryService: checks what supervisors say and hands it to the pool."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from chipmesh.scheduler.v1alpha1 import registry_pb2
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import WorkerRegistryServiceServicer
from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.rpc.exposure import require_protection
from meshkit.rpc.handlers import Context
from meshkit.rpc.peers import current_peer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.worker_pool import ExecutorState, WorkerPool

CONTRACT_VERSION = "1.0"
"""Version of the device-plugin contract that this scheduler speaks, MAJOR.MINOR."""


class RegistryServicer(WorkerRegistryServiceServicer):
    """See registry.proto for the errors of each call."""

    def __init__(self, pool: WorkerPool, *, config: SchedulerConfig, scheduler_id: str) -> None:
        self._pool = pool
        self._config = config
        self._scheduler_id = scheduler_id

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> registry_pb2.RegisterResponse:
        _check_speaker(request.worker_id)
        check_registration(request)
        require_protection(self._config, request.executor_address, field="executor_address")
        member = self._pool.register(request, peer_host=context.peer().rpartition(":")[0])
        return registry_pb2.RegisterResponse(
            lease_id=member.lease_id,
            heartbeat_interval=_duration(self._config.heartbeat_interval_s),
            lease_duration=_duration(self._config.lease_duration_s),
            scheduler_id=self._scheduler_id,
        )

    async def Heartbeat(
        self, request: registry_pb2.HeartbeatRequest, context: Context
    ) -> registry_pb2.HeartbeatResponse:
        _check_speaker(request.worker_id)
        if request.executor_state == ExecutorState.EXECUTOR_STATE_UNSPECIFIED:
            raise InvalidArgument("executor_state is unspecified; say what it is", field="executor_state")
        self._pool.heartbeat(request)
        return registry_pb2.HeartbeatResponse(swap=self._pool.swaps.order_for(request.worker_id))

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: Context
    ) -> registry_pb2.DeregisterResponse:
        _check_speaker(request.worker_id)
        self._pool.deregister(worker=request.worker_id, lease_id=request.lease_id)
        return registry_pb2.DeregisterResponse()


def _check_speaker(worker_id: str) -> None:
    """Raises PermissionDenied where the caller's certificate is that of another worker."""
    current_peer().require_name(worker_id, field="worker_id")


def check_registration(request: registry_pb2.RegisterRequest) -> None:
    """Check what does not depend on the state of the mesh.

    Raises:
        InvalidArgument: names the first field at fault.
        FailedPrecondition: the plugin speaks another version of the contract; both are named.
    """
    for field in ("worker_id", "instance_id", "executor_address", "group", "model"):
        if not getattr(request, field):
            raise InvalidArgument(f"{field} is empty", field=field)
    for field in ("page_count", "page_size_tokens", "max_slots"):
        if getattr(request, field) < 1:
            raise InvalidArgument(f"{field} is {getattr(request, field)}; it must be at least 1", field=field)
    if request.HasField("chunk_tokens") and request.chunk_tokens < 1:
        raise InvalidArgument("chunk_tokens is 0; it must be at least 1, or absent", field="chunk_tokens")
    if not request.capabilities.chip:
        raise InvalidArgument("capabilities.chip is empty; name the kind of chip", field="capabilities.chip")
    plugin = request.plugin
    if plugin.instance_id and plugin.instance_id != request.instance_id:
        raise InvalidArgument(
            f"plugin.instance_id is {plugin.instance_id!r}, but instance_id is {request.instance_id!r}",
            field="plugin.instance_id",
        )
    check_contract_version(plugin.contract_version)


def check_contract_version(theirs: str) -> None:
    """A plugin must speak our major version and, before 1.0, our minor one too.

    Raises:
        FailedPrecondition: it does not; both versions are named.
    """
    ours_major, ours_minor = CONTRACT_VERSION.split(".")
    major, _, minor = theirs.partition(".")
    if major == ours_major and (major != "0" or minor == ours_minor):
        return
    raise FailedPrecondition(
        f"the plugin speaks contract version {theirs or '(none)'}, this scheduler {CONTRACT_VERSION}; "
        "bring both to one release",
        field="plugin.contract_version",
        reason="CONTRACT_VERSION_MISMATCH",
        plugin_version=theirs,
        scheduler_version=CONTRACT_VERSION,
    )


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result
