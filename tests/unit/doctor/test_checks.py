"""Each check over plain facts: silent where all is right, and naming the one thing that is not."""

# ruff: noqa: E501 - a fault a line: the table is read by its columns
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.cli.doctor.catalogue import CHECKS, run_checks
from meshkit.cli.doctor.facts import (
    Busy,
    CertificateFacts,
    ChipFacts,
    ClockFacts,
    ExecutorFacts,
    Facts,
    GroupLimits,
    HostFacts,
    LagFacts,
    Owner,
    PortFacts,
    PortRole,
    ProcessFacts,
    ServiceFacts,
    Target,
    WorkerNeed,
)
from meshkit.cli.doctor.finding import Status
from meshkit.cli.doctor.report import describe, worst

State = admin_pb2.ReplicaStatus
NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)
GIB = 1 << 30

SCHEDULER = Target(
    "scheduler", "scheduler", "127.0.0.1:1", "127.0.0.1:2", pid=10, config_file=Path("scheduler.json"),
    config={"heartbeat_interval_s": 0.25, "lease_duration_s": 1.0, "step_deadline_floor_s": 30.0},
)  # fmt: skip
GATEWAY = Target(
    "gateway", "gateway", "127.0.0.1:3", "127.0.0.1:4", pid=20, config_file=Path("gateway.json"),
    config={"listen": "127.0.0.1:3", "max_live_requests": 4096},
)  # fmt: skip
WORKER = Target(
    "worker-0", "worker", "127.0.0.1:5", "127.0.0.1:6", "127.0.0.1:7", pid=30, executor_pid=31,
    config_file=Path("worker-0.json"),
    config={"executor": {"hung_after_s": 120.0, "probe_interval_s": 1.0, "unresponsive_after_s": 30.0}},
)  # fmt: skip


def replica(**changes: Any) -> admin_pb2.ReplicaStatus:
    facts: dict[str, Any] = {"worker": "worker-0", "chip": "chip", "state": State.STATE_READY, **changes}
    pages = facts.pop("pages", (100, 60, 40, 0))
    made = admin_pb2.ReplicaStatus(**facts)
    made.pages.total, made.pages.free, made.pages.cached, made.pages.held = pages
    return made


def mesh(*replicas: admin_pb2.ReplicaStatus, **group: Any) -> admin_pb2.Mesh:
    """One group with these replicas."""
    return admin_pb2.Mesh(
        scheduler=admin_pb2.SchedulerStatus(scheduler_id="s", pid=10, version="1.0"),
        groups=[
            admin_pb2.GroupStatus(**{"name": "a", "model": "m", "weight": 1.0, **group}, replicas=replicas)
        ],
    )


def service(target: Target, **changes: Any) -> ServiceFacts:
    return replace(
        ServiceFacts(
            target, grpc_health="SERVING", http_serving=True, clock=ClockFacts(-0.5, 1.5),
            lag=LagFacts(46, 0, 0), keepalive_lost=False,
        ),
        **changes,
    )  # fmt: skip


def process(target: Target, **changes: Any) -> ProcessFacts:
    return replace(
        ProcessFacts(
            owner=target.name, service=target.name, kind="service", pid=target.pid or 0, state="S",
            open_files=30, files_limit=20_000, resident=GIB, processors=8,
        ),
        **changes,
    )  # fmt: skip


EXECUTOR_PROCESS = process(WORKER, owner=WORKER.executor_name, kind="executor", pid=31, threads_wanted=4)


def certificate(**changes: Any) -> CertificateFacts:
    facts = CertificateFacts(
        "certs/worker-a", subject="CN=worker a", role="worker", name="a", key_file="certs/worker-a/key.pem",
        dns_names=("worker.chipmesh.internal", "a.worker.chipmesh.internal"), not_before=NOW - timedelta(days=1),
        not_after=NOW + timedelta(days=89), expected_role="worker", expected_name="a",
    )  # fmt: skip
    return replace(facts, **changes)


def port(name: str, role: PortRole, address: str, pid: int) -> PortFacts:
    return PortFacts(name, role, address, speaks=True, owner=Owner(pid, "chipmesh"), expected_pid=pid)


HOST = HostFacts(
    processors=8, memory=64 * GIB, shm=GIB, shm_free=GIB, others=0.3, copy_bytes_per_s=9e9,
    best_copy_bytes_per_s=10e9,
)  # fmt: skip
HEALTHY = Facts(
    now=NOW,
    own_version="1.0",
    targets=(SCHEDULER, GATEWAY, WORKER),
    mesh=mesh(replica()),
    services=(service(SCHEDULER), service(GATEWAY, version="1.0"), service(WORKER)),
    executors=(ExecutorFacts(WORKER, readiness="READY", contract="1.0", on_host=True, keepalive_lost=False),),
    ports=(
        port("scheduler", "grpc", "127.0.0.1:1", 10),
        port("gateway", "grpc", "127.0.0.1:3", 20),
        port("executor of worker-0", "executor", "127.0.0.1:7", 31),
    ),
    processes=(process(SCHEDULER), process(GATEWAY), process(WORKER), EXECUTOR_PROCESS),
    host=HOST,
    chips=(ChipFacts("0000:18:00.0", "pci0000:17", "0000:17:00.0", "1"),
           ChipFacts("0000:3b:00.0", "pci0000:3a", "0000:3a:00.0", "2")),
    certificates=(certificate(),),
    needs=(WorkerNeed("worker-0", 10 * GIB, 10 * GIB),),
)  # fmt: skip


def with_config(target: Target, **changes: Any) -> Facts:
    """A mesh one of whose services is configured otherwise."""
    changed = replace(target, config={**target.config, **changes})
    return replace(
        HEALTHY, targets=tuple(changed if each.name == target.name else each for each in HEALTHY.targets)
    )


def with_service(target: Target, **changes: Any) -> Facts:
    return replace(
        HEALTHY,
        services=tuple(
            service(target, **changes) if each.target is target else each for each in HEALTHY.services
        ),
    )


def with_process(owner: str, **changes: Any) -> Facts:
    return replace(
        HEALTHY,
        processes=tuple(
            replace(each, **changes) if each.owner == owner else each for each in HEALTHY.processes
        ),
    )


def with_executor(**changes: Any) -> Facts:
    return replace(HEALTHY, executors=(replace(HEALTHY.executors[0], **changes),))


def with_host(**changes: Any) -> Facts:
    return replace(HEALTHY, host=replace(HOST, **changes))


def with_mesh(*replicas: admin_pb2.ReplicaStatus, **group: Any) -> Facts:
    return replace(HEALTHY, mesh=mesh(*replicas, **group))


def with_certificate(**changes: Any) -> Facts:
    return replace(HEALTHY, certificates=(certificate(**changes),))


def with_port(name: str, **changes: Any) -> Facts:
    return replace(
        HEALTHY,
        ports=tuple(replace(each, **changes) if each.service == name else each for each in HEALTHY.ports),
    )


def with_chips(*chips: tuple[str, str, str | None, str | None]) -> Facts:
    return replace(HEALTHY, chips=tuple(ChipFacts(*each) for each in chips))


def found_in(facts: Facts) -> list[tuple[str, str, str, str]]:
    """(check, status, subject, what) of all findings."""
    return [
        (result.check_id, finding.status.word, finding.subject, finding.found)
        for result in run_checks(facts)
        for finding in result.verdict.findings
    ]


def test_a_healthy_mesh_is_green_in_every_check() -> None:
    results = run_checks(HEALTHY)
    assert [result.check_id for result in results if result.status is not Status.OK] == []
    assert worst(results) is Status.OK
    assert all(result.verdict.looked_at for result in results)


def test_without_anything_to_look_at_no_check_says_that_all_is_well() -> None:
    results = run_checks(Facts(now=NOW, own_version="1.0"))
    said_ok = [result.check_id for result in results if result.status is Status.OK]
    assert said_ok == ["versions"], "only of our own version something is known"


FAULTS: list[tuple[str, Callable[[], Facts], str, str, str, str]] = [
    ("an invalid file", lambda: replace(HEALTHY, targets=(SCHEDULER, replace(GATEWAY, config_error="field 'x' is unknown"), WORKER)), "configuration", "fault", "gateway", "field 'x'"),
    ("a stopped process", lambda: with_process("worker-0", state="T"), "processes", "fault", "worker-0", "is stopped"),
    ("a process that ended", lambda: with_process("gateway", state=""), "processes", "fault", "gateway", "has ended"),
    ("an executor that ended", lambda: with_process("executor of worker-0", state=""), "processes", "fault", "executor of worker-0", "has ended"),
    ("a process in the kernel", lambda: with_process("worker-0", state="D"), "processes", "warning", "worker-0", "kernel"),
    ("nobody listens", lambda: with_port("gateway", error="Connection refused", owner=None), "ports", "fault", "gateway", "refused"),
    ("another program's port", lambda: with_port("gateway", owner=Owner(99, "nginx -g"), speaks=False), "ports", "fault", "gateway", "nginx -g (pid 99)"),
    ("something else on another host", lambda: with_port("gateway", owner=None, speaks=False), "ports", "fault", "gateway", "no grpc of chipmesh"),
    ("another scheduler's version", lambda: replace(HEALTHY, own_version="2.0", services=(service(SCHEDULER), service(GATEWAY, version="2.0"), service(WORKER))), "versions", "fault", "scheduler", "version 1.0; others are of 2.0"),
    ("another contract", lambda: replace(HEALTHY, executors=(*HEALTHY.executors, replace(HEALTHY.executors[0], target=replace(WORKER, name="worker-1"), contract="2.0"))), "versions", "fault", "executor of worker-1", "contract version 2.0; others speak 1.0"),
    ("an expired certificate", lambda: with_certificate(not_after=NOW - timedelta(hours=1)), "certificates", "fault", "certs/worker-a", "has expired"),
    ("a certificate of tomorrow", lambda: with_certificate(not_before=NOW + timedelta(days=1)), "certificates", "fault", "certs/worker-a", "is valid from"),
    ("a certificate that ends soon", lambda: with_certificate(not_before=NOW - timedelta(days=80), not_after=NOW + timedelta(days=10)), "certificates", "warning", "certs/worker-a", "expires in 10 days"),
    ("a key for all", lambda: with_certificate(key_mode=0o644), "certificates", "fault", "certs/worker-a", "mode 0644"),
    ("an authority's key for the group", lambda: with_certificate(key_mode=0o640, is_authority=True), "certificates", "fault", "certs/worker-a", "mode 0640"),
    ("another key", lambda: with_certificate(key_matches=False), "certificates", "fault", "certs/worker-a", "is not the key"),
    ("another authority", lambda: with_certificate(authority_matches=False), "certificates", "fault", "certs/worker-a", "not signed by"),
    ("another role", lambda: with_certificate(role="gateway"), "certificates", "fault", "certs/worker-a", "of role gateway, where a worker"),
    ("another name", lambda: with_certificate(name="b"), "certificates", "fault", "certs/worker-a", "of worker b, where a"),
    ("no role", lambda: with_certificate(role=None), "certificates", "fault", "certs/worker-a", "names no role"),
    ("no name of its role", lambda: with_certificate(dns_names=("elsewhere",)), "certificates", "fault", "certs/worker-a", "lacks the DNS name"),
    ("no name of its own", lambda: with_certificate(dns_names=("worker.chipmesh.internal",)), "certificates", "fault", "certs/worker-a", "a.worker.chipmesh.internal"),
    ("an unreadable certificate", lambda: with_certificate(error="no such file"), "certificates", "fault", "certs/worker-a", "cannot be read"),
    ("a scheduler in plain text", lambda: with_config(SCHEDULER, listen="0.0.0.0:1"), "exposure", "fault", "scheduler", "listen 0.0.0.0:1 takes anyone's calls"),
    ("an executor in plain text", lambda: with_config(WORKER, executor={"listen": "10.0.0.1:0"}), "exposure", "fault", "worker-0", "executor.listen 10.0.0.1:0"),
    ("a network that is trusted", lambda: with_config(SCHEDULER, listen="0.0.0.0:1", insecure_network=True), "exposure", "warning", "scheduler", "insecure_network"),
    ("a gateway without keys", lambda: with_config(GATEWAY, listen="0.0.0.0:3"), "exposure", "fault", "gateway", "no api_keys"),
    ("a gateway for everybody", lambda: with_config(GATEWAY, listen="0.0.0.0:3", allow_anonymous=True), "exposure", "warning", "gateway", "no api_keys"),
    ("OpenAI's interface without keys", lambda: with_config(GATEWAY, listen="127.0.0.1:3", openai_listen="0.0.0.0:8000"), "exposure", "fault", "gateway", "openai_listen 0.0.0.0:8000 takes anyone's requests"),
    ("keys in plain text to OpenAI's interface", lambda: with_config(GATEWAY, listen="127.0.0.1:3", openai_listen="0.0.0.0:8000", api_keys=[{"name": "a"}]), "exposure", "warning", "gateway", "openai_listen 0.0.0.0:8000 takes keys in plain text"),
    ("OpenAI's port held by another", lambda: with_port("gateway", role="openai", address="127.0.0.1:8000", speaks=None, owner=Owner(99, "nginx")), "ports", "fault", "gateway", "openai at 127.0.0.1:8000: the port is held by another program"),
    ("keys in plain text", lambda: with_config(GATEWAY, listen="0.0.0.0:3", api_keys=[{"name": "a"}]), "exposure", "warning", "gateway", "keys in plain text"),
    ("too many pings", lambda: with_service(GATEWAY, keepalive_lost=True), "keepalive", "fault", "gateway", "too_many_pings"),
    ("too many pings at an executor", lambda: with_executor(keepalive_lost=True), "keepalive", "fault", "executor of worker-0", "too_many_pings"),
    ("a late loop", lambda: with_service(GATEWAY, lag=LagFacts(46, 10, 0)), "loop-lag", "warning", "gateway", "10 times of 46"),
    ("a very late loop", lambda: with_service(GATEWAY, lag=LagFacts(10, 5, 4)), "loop-lag", "fault", "gateway", "4 times of 10"),
    ("a loop that hangs", lambda: with_service(GATEWAY, lag=LagFacts(1, 1, 1)), "loop-lag", "fault", "gateway", "hangs"),
    ("no answer", lambda: with_service(GATEWAY, grpc_health=None, grpc_error="UNAVAILABLE: x"), "health", "fault", "gateway", "does not answer"),
    ("a service that does not serve", lambda: with_service(GATEWAY, http_serving=False, parts={"scheduler": "none"}), "health", "fault", "gateway", "scheduler: none"),
    ("no health over HTTP", lambda: with_service(GATEWAY, http_serving=None, http_error="refused"), "health", "fault", "gateway", "refused"),
    ("an unhealthy executor", lambda: with_executor(readiness="UNHEALTHY", message="the device is gone"), "health", "fault", "executor of worker-0", "the device is gone"),
    ("an executor that loads", lambda: with_executor(readiness="INITIALISING"), "health", "warning", "executor of worker-0", "not ready yet"),
    ("a silent scheduler", lambda: replace(HEALTHY, mesh=None, mesh_error="PERMISSION_DENIED: no"), "scheduler", "fault", "scheduler", "PERMISSION_DENIED"),
    ("an unknown worker", lambda: with_mesh(replica(worker="other")), "scheduler", "fault", "worker-0", "does not know it"),
    ("a kept-out replica", lambda: with_mesh(replica(), replica(worker="x", state=State.STATE_KEPT_OUT, message="gap of 3")), "replicas", "fault", "x", "kept out in group a (gap of 3)"),
    ("a lost replica", lambda: with_mesh(replica(), replica(worker="x", state=State.STATE_LOST)), "replicas", "fault", "x", "is lost"),
    ("a draining replica", lambda: with_mesh(replica(), replica(worker="x", state=State.STATE_DRAINING)), "replicas", "warning", "x", "is draining"),
    ("a group rolled back", lambda: with_mesh(replica(), rolled_back="errors"), "groups", "fault", "group a", "took its traffic away: errors"),
    ("a model without weight", lambda: with_mesh(replica(), weight=0.0), "groups", "fault", "group a", "weight 0"),
    ("pages that do not add up", lambda: with_mesh(replica(pages=(100, 60, 30, 0))), "pages", "fault", "worker-0", "60 free + 30 cached + 0 held are not 100"),
    ("pages that nobody holds", lambda: with_mesh(replica(pages=(100, 50, 40, 10))), "pages", "warning", "worker-0", "10 pages are held"),
    ("violations of page identity", lambda: with_service(SCHEDULER, counters={"chipmesh_page_identity_violations_total": 2.0}), "pages", "fault", "scheduler", "2 violations"),
    ("emulated beside real", lambda: with_mesh(replica(), replica(worker="x", emulated=True)), "emulation", "warning", "model m", "(x) beside real ones"),
    ("a short lease", lambda: with_config(SCHEDULER, lease_duration_s=0.6), "leases", "warning", "scheduler", "fewer than 3 heartbeats"),
    ("a long lease", lambda: with_config(SCHEDULER, lease_duration_s=60.0), "leases", "warning", "scheduler", "a lease of 60 s"),
    ("a hasty supervisor", lambda: with_config(WORKER, executor={"hung_after_s": 5.0}), "leases", "warning", "worker-0", "hung_after_s is 5"),
    ("few probes", lambda: with_config(WORKER, executor={"probe_interval_s": 1.0, "unresponsive_after_s": 2.0}), "leases", "warning", "worker-0", "unresponsive_after_s is 2"),
    ("a clock an hour ahead", lambda: with_service(GATEWAY, clock=ClockFacts(3599.0, 3601.5)), "clocks", "fault", "gateway", "3599 s ahead of"),
    ("a clock five seconds behind", lambda: with_service(GATEWAY, clock=ClockFacts(-7.5, -5.0)), "clocks", "warning", "gateway", "5 s behind"),
    ("few files", lambda: with_process("gateway", files_limit=64), "limits.open-files", "fault", "gateway", "may open 64 files and has 30"),
    ("nearly all files open", lambda: with_process("gateway", open_files=19_000), "limits.open-files", "fault", "gateway", "has 19000"),
    ("fewer files than streams", lambda: with_process("gateway", files_limit=1024), "limits.open-files", "warning", "gateway", "4096 live requests"),
    ("no room for a thread", lambda: with_process("worker-0", groups=GroupLimits(pids_limit=100, pids_used=99)), "limits.pids", "fault", "worker-0", "99 of 100"),
    ("memory nearly used", lambda: with_process("worker-0", groups=GroupLimits(memory_limit=40 * GIB, memory_used=39 * GIB, memory_file="g")), "limits.memory", "fault", "worker-0", "39.0 GiB of the 40.0 GiB"),
    ("killed for memory", lambda: with_process("worker-0", groups=GroupLimits(oom_kills=2, memory_file="g")), "limits.memory", "warning", "worker-0", "ended 2 processes"),
    ("a model that does not fit", lambda: replace(HEALTHY, needs=(WorkerNeed("worker-0", 50 * GIB, 10 * GIB),)), "limits.memory", "fault", "worker-0", "50.0 GiB for weights and 10.0 GiB for the KV cache"),
    ("a full /dev/shm", lambda: with_host(shm_free=GIB // 100), "limits.shared-memory", "fault", "/dev/shm", "are free"),
    ("a small /dev/shm", lambda: with_host(shm=1 << 20, shm_free=1 << 20), "limits.shared-memory", "warning", "/dev/shm", "1 MiB only"),
    ("weights swapped out", lambda: with_process("executor of worker-0", swapped=GIB), "limits.swap", "fault", "executor of worker-0", "1.0 GiB of it are swapped out"),
    ("a little swapped out", lambda: with_process("worker-0", swapped=1 << 20), "limits.swap", "warning", "worker-0", "1 MiB"),
    ("more threads than processors", lambda: with_process("executor of worker-0", threads_wanted=9), "limits.processors", "warning", "executor of worker-0", "9 compute threads on 8"),
    ("more threads than the quota", lambda: with_process("executor of worker-0", groups=GroupLimits(quota_cores=2.0)), "limits.processors", "warning", "executor of worker-0", "4 compute threads on a quota of 2"),
    ("a quota that throttles", lambda: with_process("executor of worker-0", groups=GroupLimits(quota_cores=4.0, throttled_share=0.3)), "limits.processors", "warning", "executor of worker-0", "30%"),
    ("a hog", lambda: with_host(others=4.0, busiest=(Busy(7, "hog", 4.0),), copy_bytes_per_s=4e9), "contention", "warning", "this host", "hog (pid 7, 4.0); a copy of memory runs at 4.0 GB/s"),
    ("a hog of memory elsewhere", lambda: with_host(copy_bytes_per_s=4e9), "contention", "warning", "this host", "memory's bandwidth"),
    ("steal", lambda: with_host(stolen=2.0), "contention", "warning", "this host", "withholds 2.0 of 8"),
    ("one root port", lambda: with_chips(("a", "pci0", "p", "1"), ("b", "pci0", "p", "1")), "chip-links", "warning", "chips a, b", "one root port (p)"),
    ("one IOMMU group", lambda: with_chips(("a", "pci0", "p", "1"), ("b", "pci1", "q", "1")), "chip-links", "warning", "chips a, b", "one IOMMU group (1)"),
    ("one root complex", lambda: with_chips(("a", "pci0", "p", "1"), ("b", "pci0", "q", "2")), "chip-links", "warning", "chips a, b", "one root complex (pci0)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "check", "status", "subject", "words"),
    [pytest.param(*rest, id=name) for name, *rest in FAULTS],
)
def test_each_fault_is_found_by_its_check_alone(
    make: Callable[[], Facts], check: str, status: str, subject: str, words: str
) -> None:
    found = found_in(make())
    assert [each[:3] for each in found] == [(check, status, subject)]
    assert words in found[0][3]


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {check.check_id for check in CHECKS} == {check for _, _, check, *_ in FAULTS}


def test_a_stopped_worker_is_one_fault_with_all_that_follows_from_it() -> None:
    facts = replace(
        with_process("worker-0", state="T"),
        services=(
            service(SCHEDULER),
            service(GATEWAY),
            service(
                WORKER, grpc_health=None, grpc_error="DEADLINE_EXCEEDED: x", http_error="timed out", lag=None
            ),
        ),
        mesh=mesh(replica(state=State.STATE_LOST)),
    )
    (processes,) = (result for result in run_checks(facts) if result.verdict.findings)
    (finding,) = processes.verdict.findings
    assert (processes.check_id, finding.subject) == ("processes", "worker-0")
    assert [each.partition(":")[0] for each in finding.consequences] == ["health", "replicas", "groups"]


def test_a_scheduler_that_has_ended_explains_a_gateway_that_does_not_serve() -> None:
    facts = replace(
        with_process("scheduler", state=""),
        services=(
            service(SCHEDULER, grpc_health=None, grpc_error="UNAVAILABLE: x"),
            service(GATEWAY, http_serving=False),
            service(WORKER),
        ),
        mesh=None,
        mesh_error="UNAVAILABLE: x",
    )
    found = found_in(facts)
    assert [each[:3] for each in found] == [("processes", "fault", "scheduler")]


def test_what_is_wrong_by_itself_is_no_consequence_of_another_fault_of_the_same_service() -> None:
    facts = replace(
        with_config(WORKER, executor={"listen": "0.0.0.0:0"}),
        processes=(process(SCHEDULER), process(GATEWAY), process(WORKER, state="T"), EXECUTOR_PROCESS),
    )
    assert [each[0] for each in found_in(facts)] == ["processes", "exposure"]


def test_an_open_listener_does_not_explain_why_a_service_is_silent() -> None:
    facts = replace(
        with_config(WORKER, executor={"listen": "0.0.0.0:0"}),
        services=(service(SCHEDULER), service(GATEWAY), service(WORKER, grpc_health=None, grpc_error="x")),
    )
    assert [each[0] for each in found_in(facts)] == ["exposure", "health"]


def test_a_bad_certificate_explains_why_its_service_is_lost() -> None:
    users = ("worker-0", "executor of worker-0")
    facts = replace(
        with_certificate(not_after=NOW - timedelta(days=1), users=users),
        services=(service(SCHEDULER), service(GATEWAY), service(WORKER, grpc_health=None, grpc_error="x")),
        mesh=mesh(replica(state=State.STATE_LOST)),
    )
    assert [each[:3] for each in found_in(facts)] == [("certificates", "fault", "certs/worker-a")]


def test_a_service_that_answers_nowhere_is_one_finding() -> None:
    refused = {"error": "Connection refused", "owner": None}
    http = PortFacts("gateway", "http", "127.0.0.1:4", error="Connection refused")
    facts = with_port("gateway", **refused)
    (found,) = found_in(replace(facts, ports=(*facts.ports, http)))
    assert found[:3] == ("ports", "fault", "gateway")
    assert found[3] == "grpc at 127.0.0.1:3: Connection refused; http at 127.0.0.1:4: Connection refused"


def test_two_faults_of_different_things_are_both_told() -> None:
    facts = replace(with_process("worker-0", state="T"), certificates=(certificate(key_mode=0o644),))
    assert [each[0] for each in found_in(facts)] == ["processes", "certificates"]


def test_two_faults_of_one_certificate_are_both_told() -> None:
    facts = with_certificate(key_mode=0o644, not_after=NOW - timedelta(days=2))
    assert [each[0] for each in found_in(facts)] == ["certificates", "certificates"]


def test_a_lighter_group_without_traffic_is_a_warning_where_another_serves_its_model() -> None:
    both = mesh(replica())
    both.groups.add(name="b", model="m", weight=0.0).replicas.append(replica(worker="x"))
    assert [each[:3] for each in found_in(replace(HEALTHY, mesh=both))] == [("groups", "warning", "group b")]


def test_chips_at_one_port_of_a_shared_root_complex_are_told_for_both() -> None:
    facts = with_chips(("a", "pci0", "p", "1"), ("b", "pci0", "p", "2"), ("c", "pci0", "q", "3"))
    assert [each[2:] for each in found_in(facts)] == [
        ("chips a, b", "are behind one root port (p): they share one link to the host"),
        ("chips a, b, c",
         "are behind one root complex (pci0): their copies to and from the host share its bandwidth"),
    ]  # fmt: skip


def test_the_report_has_each_check_with_what_was_found_and_how_to_mend_it() -> None:
    facts = with_certificate(key_mode=0o644)
    report = describe(run_checks(facts), facts, duration_s=1.0)
    assert report["status"] == "fault"
    (finding,) = (each for check in report["checks"] for each in check["findings"])
    assert finding["mend"].startswith("chmod 600 certs/worker-a/key.pem")
    assert {check["status"] for check in report["checks"]} == {"ok", "fault"}
