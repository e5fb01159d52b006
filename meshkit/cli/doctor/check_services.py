"""Checks of services one by one: configured right, running, reachable, healthy, in time, of one version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshkit.cli.doctor.facts import Facts, PortFacts, ProcessFacts, ServiceFacts, Target
from meshkit.cli.doctor.finding import Finding, Verdict, fault, named, skipped, verdict, warning

SKEW_WARNING_S, SKEW_FAULT_S = 2.0, 30.0
LATE_SHARE = 0.05
"""Of the wake-ups of a loop: so many may be late on a busy machine."""
LEAST_WAKEUPS = 5
FAR_FROM_SERVING = {"STARTING", "INITIALISING"}


def check_configuration(facts: Facts) -> Verdict:
    """Each file is what its service accepts."""
    files = [target for target in facts.targets if target.config_file is not None]
    if not files:
        return skipped("no configuration file is known; name them with --config")
    findings = [
        fault(target.name, target.config_error, "change the field that is named; docs/operating.md lists all")
        for target in files
        if target.config_error
    ]
    return verdict(f"{len(files)} files are valid: {named([target.name for target in files])}", findings)


def check_processes(facts: Facts) -> Verdict:
    """Each process of this host runs."""
    if not facts.processes:
        return skipped("no process of the mesh is known on this host")
    targets = {target.name: target for target in facts.targets}
    findings = [
        finding
        for process in facts.processes
        if (finding := _process_finding(process, targets[process.service])) is not None
    ]
    return verdict(f"{len(facts.processes)} processes run", findings)


def _process_finding(process: ProcessFacts, target: Target) -> Finding | None:
    if process.state == "":
        if process.kind == "executor":
            return fault(
                process.owner,
                f"its process {process.pid} has ended",
                "its supervisor starts another one; its log tells why",
                follows_from=(process.service,),
            )
        return fault(
            process.owner,
            f"its process {process.pid} has ended",
            f"read the end of its log, then {target.start_command}",
        )
    if process.state in ("T", "t"):
        return fault(
            process.owner,
            f"its process {process.pid} is stopped (state {process.state}) and answers nobody",
            f"let it go on: kill -CONT {process.pid}; where a debugger holds it, detach that",
        )
    if process.state == "D":
        return warning(
            process.owner,
            f"its process {process.pid} waits for the kernel (state D)",
            "look at disks, network file systems and the chip's driver (dmesg)",
        )
    return None


def check_ports(facts: Facts) -> Verdict:
    """Somebody answers at each address, and it is the service."""
    if not facts.ports:
        return skipped("no address is known: no ready_file, and no fixed port in a configuration")
    targets = {name: target for target in facts.targets for name in (target.name, target.executor_name)}
    findings: dict[str, Finding] = {}
    for port in facts.ports:
        finding = _port_finding(port, targets[port.service])
        if finding is not None:
            first = findings.get(port.service, finding)
            both = finding.found if first is finding else f"{first.found}; {finding.found}"
            findings[port.service] = replace(first, found=both)
    return verdict(f"{len(facts.ports)} addresses answer", list(findings.values()))


def _port_finding(port: PortFacts, target: Target) -> Finding | None:
    where = f"{port.role} at {port.address}"
    stranger = _stranger(port)
    if stranger:
        return fault(
            port.service,
            f"{where}: the port is held by another program: {stranger}",
            "end that program, or give the service another port in its configuration and start it again",
        )
    if port.error is not None:
        follows = (target.name,) if port.role == "executor" else ()
        return fault(
            port.service,
            f"{where}: {port.error}",
            f"{target.start_command}; where it runs on another host, look at firewalls and at its `listen`",
            follows_from=follows,
        )
    if port.speaks is False:
        return fault(
            port.service,
            f"{where}: something answers that is no {port.role} of chipmesh",
            "look who listens there (ss -ltnp), and whether the address is the right one",
        )
    return None


def _stranger(port: PortFacts) -> str | None:
    """The program that listens where it should not; None where it is the right one, or cannot be seen."""
    owner = port.owner
    if owner is None or owner.pid == port.expected_pid:
        return None
    # What answers as it should may be a proxy, where nobody says which process must listen there.
    if port.speaks if port.expected_pid is None else (owner.is_ours and port.speaks is not False):
        return None
    return f"{owner.command} (pid {owner.pid})"


def check_health(facts: Facts) -> Verdict:
    """What services and executors say of themselves."""
    if not facts.services and not facts.executors:
        return skipped("no service's address is known")
    findings = [finding for each in facts.services for finding in _health_findings(each)]
    for each in facts.executors:
        subject, mend = each.target.executor_name, "its supervisor replaces it when that lasts; see its log"
        if each.error is not None:
            findings.append(
                fault(subject, f"does not answer: {each.error}", mend, follows_from=(each.target.name,))
            )
        elif each.readiness == "INITIALISING":
            findings.append(warning(subject, f"is not ready yet: {each.message}", "wait until it has loaded"))
        elif each.readiness != "READY":
            findings.append(fault(subject, f"is {each.readiness}: {each.message}", mend))
    count = len(facts.services) + len(facts.executors)
    return verdict(f"{count} services and executors serve", findings)


def _health_findings(service: ServiceFacts) -> Iterator[Finding]:
    target = service.target
    # A gateway serves only with a scheduler; what a supervisor says is of its executor.
    follows = ("scheduler", *_scheduler_names(service)) if target.kind != "scheduler" else ()
    follows += (target.executor_name,) if target.kind == "worker" else ()
    parts = "; ".join(f"{name}: {value}" for name, value in service.parts.items())
    if target.asked_address is not None and service.grpc_health is None:
        yield fault(
            target.name,
            f"does not answer a health check at {target.address}: {service.grpc_error}",
            "look at its log, and whether its process hangs (`processes`, `loop-lag`)",
            follows_from=follows,
        )
    elif service.http_serving is False or service.grpc_health == "NOT_SERVING":
        yield fault(
            target.name,
            f"says that it does not serve ({parts or service.grpc_health})",
            "the parts say what is missing; its log says since when",
            follows_from=follows,
        )
    elif service.http_error is not None:
        yield fault(
            target.name,
            f"/health at {target.http_address}: {service.http_error}",
            "look at its log and at its `http_listen`",
            follows_from=follows,
        )


def _scheduler_names(service: ServiceFacts) -> tuple[str, ...]:
    """What findings may call the scheduler that a service needs."""
    address = service.target.config.get("scheduler_address")
    return (f"scheduler at {address}",) if address else ()


def check_clocks(facts: Facts) -> Verdict:
    """Wall clocks agree. Of the mesh only certificates expire by them; logs and traces are read by them."""
    read = [each for each in facts.services if each.clock is not None]
    if not read:
        return skipped("no service tells its time: none answers over HTTP")
    findings: list[Finding] = []
    widest = 0.0
    for each in read:
        assert each.clock is not None
        widest = max(widest, abs(each.clock.low_s), abs(each.clock.high_s))
        skew = each.clock.certain_s
        if abs(skew) < SKEW_WARNING_S:
            continue
        way = "ahead of" if skew > 0 else "behind"
        make = fault if abs(skew) >= SKEW_FAULT_S else warning
        findings.append(
            make(
                each.target.name,
                f"its clock is at least {abs(skew):.0f} s {way} this host's",
                "let both hosts follow one time server (chrony, systemd-timesyncd): chronyc tracking",
            )
        )
    return verdict(
        f"{len(read)} clocks are within {widest:.1f} s of this host's (as far as HTTP tells)", findings
    )


def check_loop_lag(facts: Facts) -> Verdict:
    """Event loops wake up in time: a busy one serves nobody."""
    seen = [each for each in facts.services if each.lag is not None]
    if not seen:
        return skipped("no service's metrics tell of its event loop")
    findings: list[Finding] = []
    mend = (
        "give it processors of its own, or spread its load over more of its kind; `chipmesh_loop_lag_seconds`"
    )
    for each in seen:
        lag = each.lag
        assert lag is not None
        if lag.wakeups < LEAST_WAKEUPS:
            text = f"its event loop woke up {lag.wakeups} times in some seconds: it hangs"
            findings.append(fault(each.target.name, text, mend))
        elif lag.very_late > LATE_SHARE * lag.wakeups:
            text = f"its event loop was more than 1 s late {lag.very_late} times of {lag.wakeups}"
            findings.append(fault(each.target.name, text, mend))
        elif lag.late > LATE_SHARE * lag.wakeups:
            text = f"its event loop was more than 0.25 s late {lag.late} times of {lag.wakeups}"
            findings.append(warning(each.target.name, text, mend))
    return verdict(f"{len(seen)} event loops wake up in time", findings)


def check_keepalive(facts: Facts) -> Verdict:
    """A quiet connection with our clients' pings stays: else each quiet stream ends within seconds."""
    held = [
        (each.target.name, each.keepalive_lost) for each in facts.services if each.keepalive_lost is not None
    ]
    held += [
        (each.target.executor_name, each.keepalive_lost)
        for each in facts.executors
        if each.keepalive_lost is not None
    ]
    if not held:
        return skipped("no connection could be made")
    findings = [
        fault(
            name,
            "ended a quiet connection that pings as our clients do (too_many_pings)",
            "both ends must be of one version of chipmesh; a proxy between them must allow a ping a second "
            "without data, or be left out",
        )
        for name, lost in held
        if lost
    ]
    return verdict(f"{len(held)} quiet connections stayed", findings)


def check_versions(facts: Facts) -> Verdict:
    """All run the same release, and executors speak one contract."""
    told = {"this command": facts.own_version}
    if facts.mesh is not None:
        told[_scheduler_of(facts)] = facts.mesh.scheduler.version
    told |= {each.target.name: each.version for each in facts.services if each.version}
    usual = _most_common(list(told.values()))
    mend = "update it, then restart it: services of one mesh are of one release"
    findings = [
        fault(name, f"is of version {version}; others are of {usual}", mend)
        for name, version in told.items()
        if version != usual
    ]
    contracts = {each.target.executor_name: each.contract for each in facts.executors if each.contract}
    wanted = _most_common(list(contracts.values()))
    findings += [
        fault(name, f"speaks contract version {version}; others speak {wanted}", mend)
        for name, version in contracts.items()
        if version != wanted
    ]
    silent = [each.target.name for each in facts.services if each.target.name not in told]
    text = f"version {usual}: {named(list(told))}; contract {wanted or 'unknown'}"
    return verdict(text + (f"; not reported by {named(silent)}" if silent else ""), findings)


def _scheduler_of(facts: Facts) -> str:
    return next((target.name for target in facts.targets if target.kind == "scheduler"), "scheduler")


def _most_common(versions: list[str | None]) -> str | None:
    """On a tie the first: of versions that is this command's own."""
    return Counter(versions).most_common(1)[0][0] if versions else None
