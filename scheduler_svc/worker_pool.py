"""The workers: leases on the monotonic clock, and the link that each one's executor is kept on."""

from __future__ import annotations

import asyncio
import enum
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1 import execution_pb2
from chipmesh.scheduler.v1alpha1 import registry_pb2
from meshkit.errors import AlreadyExists, FailedPrecondition, MeshError, NotFound
from meshkit.telemetry.logging import get_logger
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.structures import ReplicaId
from scheduler_svc.engine import Engine
from scheduler_svc.executor_link import ExecutorLink, LinkSettings
from scheduler_svc.executor_profile import profile_executor
from scheduler_svc.groups import GroupTable
from scheduler_svc.live_request import ReplicaInfo
from scheduler_svc.parity import ParityGate, other_class
from scheduler_svc.swaps import Swaps

log = get_logger(__name__)

REMEMBERED_INSTANCES = 16

ExecutorState = registry_pb2.HeartbeatRequest.ExecutorState


class WorkerState(enum.Enum):
    """What a worker is to the mesh."""

    ATTACHING = "attaching"
    ON_TRIAL = "on_trial"
    KEPT_OUT = "kept_out"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Member:
    """One registration of one worker: an executor under a lease."""

    registration: registry_pb2.RegisterRequest
    peer_host: str
    lease_id: str
    lease_until: float
    """Loop time, seconds."""
    executor_ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the supervisor says that this executor takes steps."""
    draining: bool = False
    lost: str | None = None
    """Why the lease ended, where it did."""
    broken: bool = False
    """The last attachment ended and no new one has been made."""
    on_trial: bool = False
    """Answers parity prompts before it takes requests."""
    kept_out: str = ""
    """Why it takes no requests, where it did not pass."""
    replaced: tuple[str, ...] = ()
    """The executors of this worker before this one, as far as they are remembered."""
    next_instance_id: str = ""
    """The executor that the holder of the lease has announced in place of this one."""
    executor_trouble: str = ""
    """Why its supervisor says that it does not take steps."""
    was_cut: bool = False
    """The last attachment ended as its connection was cut."""
    link: ExecutorLink | None = None
    report: execution_pb2.AttachResponse | None = None
    """What its executor said when it was attached last."""
    keeper: asyncio.Task[None] | None = None
    lease_timer: asyncio.TimerHandle | None = None

    @property
    def worker(self) -> str:
        """Stable id of the worker."""
        return self.registration.worker_id

    @property
    def replica(self) -> ReplicaId:
        """The replica that this executor is; a new executor is a new replica."""
        return ReplicaId(f"{self.registration.worker_id}/{self.registration.instance_id}")

    @property
    def state(self) -> WorkerState:
        """What it is to the mesh now."""
        if self.lost is not None:
            return WorkerState.LOST
        if self.draining:
            return WorkerState.DRAINING
        if self.link is not None and self.link.attached:
            if self.kept_out:
                return WorkerState.KEPT_OUT
            return WorkerState.ON_TRIAL if self.on_trial else WorkerState.READY
        return WorkerState.LOST if self.broken else WorkerState.ATTACHING


class WorkerPool:
    """All members by worker id. Calls are synchronous and take effect at once; links run as tasks."""

    def __init__(
        self, engine: Engine, *, config: SchedulerConfig, groups: GroupTable, links: LinkSettings
    ) -> None:
        self._engine = engine
        self._config = config
        self._groups = groups
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._members: dict[str, Member] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self.swaps = Swaps()

    def __repr__(self) -> str:
        states = ", ".join(f"{member.worker}: {member.state.value}" for member in self._members.values())
        return f"<WorkerPool {states or 'empty'}>"

    @property
    def members(self) -> Iterable[Member]:
        """Every member, those lost not long ago included."""
        return self._members.values()

    def member(self, worker: str) -> Member:
        """The member of that worker id.

        Raises:
            NotFound: there is none; the text lists those there are.
        """
        if (member := self._members.get(worker)) is not None:
            return member
        raise NotFound(
            f"worker {worker!r} is not in the mesh; there is: {', '.join(sorted(self._members)) or 'none'}",
            field="worker",
            reason="UNKNOWN_WORKER",
        )

    # ------------------------------------------------------------ membership

    def register(self, request: registry_pb2.RegisterRequest, *, peer_host: str) -> Member:
        """Take a checked registration: begin a lease and a link, or renew them for the same executor.

        Raises:
            AlreadyExists: another live supervisor holds this worker id.
            InvalidArgument: the group serves another model, or may not be joined.
        """
        member = self._members.get(request.worker_id)
        live = member is not None and member.lost is None
        if member is not None and live and member.registration.instance_id == request.instance_id:
            self._renew(member)
            member.executor_ready.set()
            return member
        if member is not None and live and not _may_replace(member, request, peer_host):
            raise AlreadyExists(
                f"worker_id {request.worker_id!r} belongs to a live worker (instance "
                f"{member.registration.instance_id!r}); stop it, or bring its takeover_token",
                field="worker_id",
                reason="WORKER_ALIVE",
                instance_id=member.registration.instance_id,
            )
        self._groups.join(request.group, model=request.model)
        if member is not None:
            swap = self.swaps.running(request.worker_id)
            if swap is not None:
                swap.reach("fence")
            self._release(member, "replaced by a new executor", blame=swap is None)
        return self._begin(request, peer_host, replaced=_past_instances(member, request))

    def _begin(
        self, request: registry_pb2.RegisterRequest, peer_host: str, *, replaced: tuple[str, ...]
    ) -> Member:
        member = Member(request, peer_host, secrets.token_hex(8), 0.0, replaced=replaced)
        self._members[member.worker] = member
        self._renew(member)
        self._arm_lease(member)
        member.executor_ready.set()
        member.keeper = asyncio.create_task(self._keep_linked(member), name=f"link of {member.worker}")
        self._keepers.add(member.keeper)
        member.keeper.add_done_callback(self._keepers.discard)
        self._engine.changes.bump()
        log.info("worker registered", worker=member.worker, instance_id=request.instance_id,
                 group=request.group, chip=request.capabilities.chip)  # fmt: skip
        return member

    def heartbeat(self, request: registry_pb2.HeartbeatRequest) -> None:
        """Renew a lease and take note of the executor's state.

        Raises:
            NotFound: the lease has ended or was never given; the caller registers again.
        """
        member = self._members.get(request.worker_id)
        if member is None or member.lost is not None or member.lease_id != request.lease_id:
            raise NotFound(
                f"worker {request.worker_id!r} has no lease {request.lease_id!r} here; register again",
                field="lease_id",
                reason="LEASE_UNKNOWN",
            )
        self._renew(member)
        if request.HasField("swap"):
            self.swaps.heard(member.worker, request.swap)
        if request.instance_id != member.registration.instance_id:
            member.next_instance_id = request.instance_id
            member.executor_trouble = request.message or member.executor_trouble
            self._executor_gone(member, f"its supervisor has instance {request.instance_id!r} now")
        elif request.executor_state == ExecutorState.EXECUTOR_STATE_READY:
            member.executor_ready.set()
            member.executor_trouble = ""
        elif request.executor_state == ExecutorState.EXECUTOR_STATE_DRAINING:
            self.begin_drain(member)
        else:
            member.executor_trouble = request.message or member.executor_trouble
            self._executor_gone(member, request.message or "its supervisor says that it does not take steps")

    def deregister(self, *, worker: str, lease_id: str) -> None:
        """End a membership. Idempotent; a lease that is not the present one changes nothing."""
        member = self._members.get(worker)
        if member is not None and member.lease_id == lease_id:
            self._release(member, "deregistered")
            del self._members[worker]
            self._engine.changes.bump()
            log.info("worker deregistered", worker=worker)

    def begin_drain(self, member: Member) -> None:
        """Nothing new goes to the worker. Idempotent."""
        if not member.draining:
            member.draining = True
            self._engine.drain_replica(member.replica)
            self._engine.changes.bump()
            log.info("worker drains", worker=member.worker)

    async def drain(self, member: Member, *, timeout_s: float) -> None:
        """Return once the worker has no requests: they ended, or moved after `timeout_s` seconds."""
        self.begin_drain(member)
        try:
            await asyncio.wait_for(self._engine.wait_until_unused(member.replica), timeout_s)
        except asyncio.TimeoutError:
            log.info("worker's requests move", worker=member.worker, timeout_s=timeout_s)
            self._executor_gone(member, "drained")

    def set_group(self, name: str, **settings: Any) -> None:
        """Change settings of a group (as GroupConfig has them) while it runs; None takes a ceiling away.

        Raises:
            NotFound: there is no such group.
            InvalidArgument: a value is out of range. Nothing was changed.
        """
        self._groups.change(name, **settings)
        if (policy := settings.get("schedule_policy")) is not None:
            self._engine.set_policy(name, policy)
        for member in self._members.values():
            is_attached = self._engine.info(member.replica) is not None
            if member.registration.group == name and member.report is not None and is_attached:
                limits = self._groups.limits(member.registration, member.report)
                self._engine.set_ceilings(member.replica, limits)
        log.info("group changed", group=name, **settings)

    async def close(self) -> None:
        """Release every executor; return when all links have ended."""
        for member in self._members.values():
            self._release(member, "the scheduler stops")
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def _release(self, member: Member, reason: str, *, blame: bool = True) -> None:
        if member.lease_timer is not None:
            member.lease_timer.cancel()
        self._executor_gone(member, reason, blame=blame)
        if member.keeper is not None:
            member.keeper.cancel()

    def _executor_gone(self, member: Member, reason: str, *, blame: bool = True) -> None:
        member.executor_ready.clear()
        if member.link is not None:
            member.link.close(reason, blame=blame)

    # ------------------------------------------------------------ leases

    def _renew(self, member: Member) -> None:
        member.lease_until = self._loop.time() + self._config.lease_duration_s

    def _arm_lease(self, member: Member) -> None:
        member.lease_timer = self._loop.call_at(
            member.lease_until, self._check_lease, member, member.lease_until
        )

    def _check_lease(self, member: Member, planned: float) -> None:
        """Runs when a lease would have ended had nobody renewed it: one timer serves many heartbeats."""
        now = self._loop.time()
        if now - planned > self._config.heartbeat_interval_s:
            # This loop was held up itself, so heartbeats may wait unread: not the worker's fault.
            log.warning("the scheduler's loop was late, leases are extended", late_s=now - planned)
            member.lease_until = max(member.lease_until, now + self._config.heartbeat_interval_s)
        if member.lease_until > now:
            self._arm_lease(member)
            return
        log.warning("lease ended", worker=member.worker, instance_id=member.registration.instance_id)
        member.lost = f"no heartbeat for {self._config.lease_duration_s} s"
        self.swaps.lost(member.worker, member.lost)
        self._release(member, f"lease ended: {member.lost}")
        member.lease_timer = self._loop.call_later(self._config.forget_lost_after_s, self._forget, member)
        self._engine.changes.bump()

    def _forget(self, member: Member) -> None:
        if self._members.get(member.worker) is member:
            del self._members[member.worker]
            self._engine.changes.bump()

    async def profile(self, member: Member, duration: Duration) -> bytes:
        """A trace of a worker's executor, recorded while it serves.

        Raises:
            FailedPrecondition: it has no executor that is attached. Else as ExecutionService.Profile.
        """
        if member.link is None or not member.link.attached:
            raise FailedPrecondition(
                f"worker {member.worker!r} is {member.state.name.lower()}; there is no executor to profile",
                field="worker",
                reason="NOT_ATTACHED",
            )
        return await profile_executor(
            member.registration.executor_address, worker=member.worker, duration=duration, links=self._links
        )

    # ------------------------------------------------------------ links

    async def _keep_linked(self, member: Member) -> None:
        """Attach, and attach again with a new epoch while the supervisor says that the executor lives."""
        backoff_s = self._config.reattach_backoff_s
        while not member.draining:
            await member.executor_ready.wait()
            link = member.link = self._make_link(member)
            reason = await _run(link)
            member.broken, member.was_cut = True, link.was_cut
            self._engine.changes.bump()
            log.warning("executor link ended", worker=member.worker, epoch=link.epoch, reason=reason)
            if link.epoch is not None:
                backoff_s = self._config.reattach_backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._config.reattach_backoff_max_s)

    def _make_link(self, member: Member) -> ExecutorLink:
        own_window_s = self._groups.config(member.registration.group).step_window_s
        settings = self._links if own_window_s is None else replace(self._links, window_s=own_window_s)

        def attached(response: execution_pb2.AttachResponse) -> None:
            self._on_attached(member, link, response)

        link = ExecutorLink(
            member.replica,
            worker=member.worker,
            preferred_window_s=member.registration.capabilities.preferred_step_window_ms / 1000,
            target=member.registration.executor_address,
            instance_id=member.registration.instance_id,
            source=self._engine,
            settings=settings,
            on_attached=attached,
            # One that is drained or swapped did nothing wrong, nor did the requests that leave it.
            on_closed=lambda blame: self._engine.remove_replica(
                member.replica,
                blame=blame and not member.draining and self.swaps.running(member.worker) is None,
            ),
        )
        return link

    def _on_attached(
        self, member: Member, link: ExecutorLink, response: execution_pb2.AttachResponse
    ) -> None:
        registration = member.registration
        info = ReplicaInfo(
            replica=member.replica,
            worker=member.worker,
            group=registration.group,
            model=registration.model,
            chip=registration.capabilities.chip,
            numeric_class=response.model.numeric_class,
            vocab_size=response.model.vocab_size,
        )
        member.report = response
        limits = self._groups.limits(registration, response)
        member.broken = False
        log.info("executor attached", worker=member.worker, epoch=response.epoch, limits=repr(limits))
        parity = self._groups.config(info.group).parity
        peer = None if parity is None else other_class(info, self._serving(info.group, but=member))
        member.on_trial, member.kept_out = peer is not None, ""
        swap = self.swaps.running(member.worker)
        if swap is not None and swap.stage == "fence":
            swap.reach("parity" if member.on_trial else "replay")
        if member.was_cut:
            self._engine.forgive(info.replica)
        self._engine.add_replica(info, limits, wake=link.wake, on_trial=member.on_trial)
        if swap is not None and swap.stage == "replay":
            swap.reach("done", 1.0)
        if parity is not None and peer is not None:
            trial = asyncio.create_task(
                self._try(member, link, ParityGate(self._engine, parity), info, peer),
                name=f"parity of {member.worker}",
            )
            self._keepers.add(trial)
            trial.add_done_callback(self._keepers.discard)

    def _serving(self, group: str, *, but: Member) -> list[ReplicaInfo]:
        ready = {each.replica for each in self._members.values() if each.state is WorkerState.READY}
        return [info for info in self._engine.serving(group) if info.replica in ready - {but.replica}]

    async def _try(
        self, member: Member, link: ExecutorLink, gate: ParityGate, info: ReplicaInfo, peer: ReplicaInfo
    ) -> None:
        """Let a replica in once it answers as its peer does; one that does not stays attached, unused."""
        reason = await gate.reason_to_keep_out(info, peer)
        if member.link is not link or not link.attached:
            return  # It is gone, and its successor has a trial of its own.
        member.on_trial, member.kept_out = False, reason
        if (swap := self.swaps.running(member.worker)) is not None:
            if reason:
                swap.fail(f"the new executor is attached, and gets no requests: {reason}", reason="PARITY")
            else:
                swap.reach("done", 1.0)
        if reason:
            log.error("replica kept out", worker=info.worker, numeric_class=info.numeric_class, reason=reason)
        else:
            log.info("replica passed the parity gate", worker=info.worker, peer=peer.worker)
            self._engine.admit_replica(info.replica)
        self._engine.changes.bump()


async def _run(link: ExecutorLink) -> str:
    """Run a link to its end; why it ended, for logs. A fault of ours costs this replica, not the mesh."""
    try:
        return await link.run()
    except MeshError as error:
        return error.message
    except Exception:
        log.exception("executor link failed", replica=link.replica)
        return "internal error"


def _past_instances(member: Member | None, request: registry_pb2.RegisterRequest) -> tuple[str, ...]:
    """The executors that one which registers now has replaced."""
    if member is None:
        return ()
    before = member.registration.instance_id
    if before == request.instance_id:
        return member.replaced
    return (*member.replaced, before)[-REMEMBERED_INSTANCES:]


def _may_replace(member: Member, request: registry_pb2.RegisterRequest, peer_host: str) -> bool:
    """Whether a registration comes from the holder of the lease, or from one that knows its secret. One of an
    executor that this one has replaced was late on its way: it would put a dead one in its successor's place.
    """
    if request.instance_id in member.replaced:
        return False
    old = member.registration
    if old.takeover_token and hmac.compare_digest(old.takeover_token, request.takeover_token):
        return True
    if member.next_instance_id and member.next_instance_id == request.instance_id:
        return True
    same_process = old.supervisor_pid != 0 and old.supervisor_pid == request.supervisor_pid
    return same_process and member.peer_host == peer_host
