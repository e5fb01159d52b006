"""Checks of the mesh as its scheduler sees it: groups, replicas, pages, emulations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from chipmesh.scheduler.v1alpha1.admin_pb2 import GroupStatus, Mesh, ReplicaStatus
from meshkit.cli.doctor.facts import Facts
from meshkit.cli.doctor.finding import Finding, Verdict, fault, named, skipped, verdict, warning

_FAULTS = {
    ReplicaStatus.STATE_LOST: "its lease ended or its stream broke; look at the worker's process and its "
    "link to the scheduler",
    ReplicaStatus.STATE_KEPT_OUT: "it did not pass the group's parity; correct its numbers, or the bound of "
    "the group's `parity`, and start it again",
    ReplicaStatus.STATE_UNSPECIFIED: "the scheduler and this command are of different versions",
}
_WARNINGS = {
    ReplicaStatus.STATE_ATTACHING: "it takes requests soon; where it stays so, the scheduler does not reach "
    "its executor (executor.advertise)",
    ReplicaStatus.STATE_ON_TRIAL: "it takes requests when it has passed the group's parity",
    ReplicaStatus.STATE_DRAINING: "somebody asked for that; start it again when it has ended",
}
IDENTITY_VIOLATIONS = "chipmesh_page_identity_violations_total"


def of_mesh(check: Callable[[Facts, Mesh], Verdict]) -> Callable[[Facts], Verdict]:
    """A check that needs the scheduler's answer."""

    def checked(facts: Facts) -> Verdict:
        if facts.mesh is None:
            return skipped("the scheduler does not tell of its mesh")
        return check(facts, facts.mesh)

    return checked


def _mesh_itself(facts: Facts, mesh: Mesh) -> Verdict:
    scheduler = mesh.scheduler
    workers = {target.name for target in facts.targets if target.kind == "worker"}
    known = {replica.worker for group in mesh.groups for replica in group.replicas}
    findings = [
        fault(
            name,
            "the scheduler does not know it: it has never registered, or has left",
            "look at its log and at its `scheduler_address`",
            follows_from=(f"executor of {name}",),
        )
        for name in sorted(workers - known)
    ]
    identity = f"{scheduler.scheduler_id} (pid {scheduler.pid})"
    return verdict(f"{identity} has {len(known)} workers, {scheduler.gateways} gateways", findings)


def check_scheduler(facts: Facts) -> Verdict:
    """The scheduler tells of its mesh, and knows every worker that it should."""
    if facts.mesh is not None:
        return _mesh_itself(facts, facts.mesh)
    schedulers = [target for target in facts.targets if target.kind == "scheduler"]
    if not schedulers or schedulers[0].address is None:
        return skipped("no scheduler's address is known; name it with --endpoint")
    mend = (
        "start it; where it runs with TLS, give --tls DIR with an operator's certificate "
        "(chipmesh certs create ... --operator NAME)"
    )
    text = f"does not tell of its mesh at {schedulers[0].address}: {facts.mesh_error}"
    return verdict("", [fault(schedulers[0].name, text, mend)])


@of_mesh
def check_replicas(facts: Facts, mesh: Mesh) -> Verdict:
    """Every replica takes requests."""
    replicas = [(group, replica) for group in mesh.groups for replica in group.replicas]
    findings: list[Finding] = []
    for group, replica in replicas:
        if replica.state == ReplicaStatus.STATE_READY:
            continue
        state = ReplicaStatus.State.Name(replica.state).removeprefix("STATE_").lower().replace("_", " ")
        words = f" ({replica.message})" if replica.message else ""
        make = warning if replica.state in _WARNINGS else fault
        mend = _WARNINGS.get(replica.state) or _FAULTS.get(replica.state, "look at the worker's log")
        findings.append(
            make(
                replica.worker,
                f"is {state} in group {group.name}{words}",
                mend,
                follows_from=(f"executor of {replica.worker}",),
            )
        )
    return verdict(f"{len(replicas)} replicas take requests", findings)


@of_mesh
def check_groups(facts: Facts, mesh: Mesh) -> Verdict:
    """Every group has a replica that takes requests, and weight."""
    if not mesh.groups:
        return verdict("", [fault("mesh", "it has no group: no worker has registered", "start a worker")])
    findings = [finding for group in mesh.groups for finding in _group_findings(group, mesh)]
    return verdict(f"{len(mesh.groups)} groups: {named([group.name for group in mesh.groups])}", findings)


def _group_findings(group: GroupStatus, mesh: Mesh) -> Iterator[Finding]:
    subject = f"group {group.name}"
    if group.rolled_back:
        yield fault(
            subject,
            f"its guard took its traffic away: {group.rolled_back}",
            f"mend the cause, then judge it anew: chipmesh traffic set {group.name}=WEIGHT ...",
        )
    elif group.weight == 0:
        others = [each.name for each in mesh.groups if each.model == group.model and each.weight > 0]
        make = warning if others else fault
        yield make(
            subject,
            f"has weight 0: it gets no request of {group.model}",
            f"chipmesh traffic set {group.name}=WEIGHT ..., or take it out of the configuration",
        )
    if any(replica.state == ReplicaStatus.STATE_READY for replica in group.replicas):
        return
    workers = [replica.worker for replica in group.replicas]
    text = f"none of its replicas takes requests ({named(workers)})" if workers else "has no replica"
    yield fault(
        subject,
        f"{text}: requests of {group.model} wait or go to other groups",
        f"start a worker with `group: {group.name}`, or take the group out of the scheduler's configuration",
        follows_from=[name for worker in workers for name in (worker, f"executor of {worker}")],
    )


@of_mesh
def check_pages(facts: Facts, mesh: Mesh) -> Verdict:
    """free + cached + held == total, and what nobody uses is not held."""
    findings: list[Finding] = []
    count = 0
    mend = "a fault of chipmesh: restart the worker, and report it with the scheduler's log"
    for replica in (each for group in mesh.groups for each in group.replicas):
        pages = replica.pages
        if replica.state not in (ReplicaStatus.STATE_READY, ReplicaStatus.STATE_DRAINING):
            continue
        count += pages.total
        sum_text = f"{pages.free} free + {pages.cached} cached + {pages.held} held"
        if pages.free + pages.cached + pages.held != pages.total:
            findings.append(fault(replica.worker, f"{sum_text} are not {pages.total} pages", mend))
        elif pages.held and not replica.running and not replica.waiting:
            text = f"{pages.held} pages are held, and no request runs"
            findings.append(warning(replica.worker, f"{text}; look again in some seconds", mend))
    violations = sum(int(each.counters.get(IDENTITY_VIOLATIONS, 0)) for each in facts.services)
    if violations:
        name = next((target.name for target in facts.targets if target.kind == "scheduler"), "scheduler")
        findings.append(
            fault(name, f"counted {violations} violations of page identity since its start", mend)
        )
    return verdict(f"{count} pages add up", findings)


@of_mesh
def check_emulation(facts: Facts, mesh: Mesh) -> Verdict:
    """Emulated chips are named; where a model is served by them and by real ones, that is a warning."""
    emulated = [
        f"{replica.worker} ({replica.chip})"
        for group in mesh.groups
        for replica in group.replicas
        if replica.emulated
    ]
    findings: list[Finding] = []
    for model in dict.fromkeys(group.model for group in mesh.groups):
        groups = [group for group in mesh.groups if group.model == model and group.weight > 0]
        replicas = [replica for group in groups for replica in group.replicas]
        if len({replica.emulated for replica in replicas}) == 2:
            names = named([replica.worker for replica in replicas if replica.emulated])
            findings.append(
                warning(
                    f"model {model}",
                    f"is served by emulated chips ({names}) beside real ones",
                    "give the group of the emulated ones weight 0, or put a real chip in: chipmesh swap",
                )
            )
    return verdict(f"emulated: {named(emulated)}", findings)
