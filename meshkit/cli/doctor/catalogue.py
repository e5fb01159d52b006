"""All checks in order, and how one cause is told once though several checks see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshkit.cli.doctor.check_certificates import check_certificates
from meshkit.cli.doctor.check_host import check_chip_links, check_contention
from meshkit.cli.doctor.check_limits import (
    check_memory,
    check_open_files,
    check_pids,
    check_processors,
    check_shared_memory,
    check_swap,
)
from meshkit.cli.doctor.check_mesh import (
    check_emulation,
    check_groups,
    check_pages,
    check_replicas,
    check_scheduler,
)
from meshkit.cli.doctor.check_services import (
    check_clocks,
    check_configuration,
    check_health,
    check_keepalive,
    check_loop_lag,
    check_ports,
    check_processes,
    check_versions,
)
from meshkit.cli.doctor.check_settings import check_exposure, check_leases
from meshkit.cli.doctor.facts import Facts
from meshkit.cli.doctor.finding import CheckResult, Finding, Status, Verdict


@dataclass(frozen=True)
class Check:
    """why: what goes wrong where it is not so, in one sentence for people."""

    check_id: str
    why: str
    run: Callable[[Facts], Verdict]


# Causes before consequences: see `fold`.
CHECKS = (
    Check("configuration", "a service with a wrong file ends at its next start", check_configuration),
    Check("processes", "what does not run serves nobody", check_processes),
    Check("ports", "services find each other by their addresses", check_ports),
    Check("versions", "services of one mesh are made for each other", check_versions),
    Check("certificates", "a peer with a bad certificate is refused", check_certificates),
    Check("exposure", "an open listener serves anyone who reaches it", check_exposure),
    Check("keepalive", "settings that differ end every quiet stream within seconds", check_keepalive),
    Check("loop-lag", "a service whose event loop is late serves all its streams late", check_loop_lag),
    Check("health", "a service that does not serve gets no traffic", check_health),
    Check("scheduler", "it places every request", check_scheduler),
    Check("replicas", "a replica that takes no requests leaves its share to the others", check_replicas),
    Check("groups", "a group that serves nobody is traffic lost or misplaced", check_groups),
    Check("pages", "pages that leak make the cache smaller until nothing fits", check_pages),
    Check("emulation", "an emulated chip serves right tokens at a wrong speed", check_emulation),
    Check("leases", "they decide how soon a dead worker is noticed", check_leases),
    Check("clocks", "certificates end by them, and logs and traces are read by them", check_clocks),
    Check("limits.open-files", "a service without a file left refuses connections", check_open_files),
    Check("limits.pids", "a process without room for a thread fails where it stands", check_pids),
    Check("limits.memory", "the kernel ends what passes its limit", check_memory),
    Check("limits.shared-memory", "processes of one model exchange tensors there", check_shared_memory),
    Check("limits.swap", "a step that waits for a disk takes a thousand times as long", check_swap),
    Check("limits.processors", "threads that wait for each other make steps slow", check_processors),
    Check("contention", "decoding is bound by memory bandwidth, which others take unseen", check_contention),
    Check("chip-links", "chips behind one link halve each other's bandwidth", check_chip_links),
)


def run_checks(facts: Facts) -> tuple[CheckResult, ...]:
    """All checks over one set of facts, each cause told once."""
    return fold([CheckResult(check.check_id, check.why, check.run(facts)) for check in CHECKS])


CAUSES = frozenset(
    {"processes", "ports", "certificates", "keepalive", "loop-lag", "health", "scheduler", "replicas"}
)
"""Checks whose faults explain what others see of the same subject."""
SYMPTOMS = frozenset({"ports", "keepalive", "loop-lag", "health", "scheduler", "replicas", "groups"})
"""Checks that see what may follow from another fault."""


def fold(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Moves each symptom whose cause an earlier check has found to that one, as its consequence.

    A stopped worker answers no health check, loses its lease and may leave its group empty: one fault. The
    cause is the first fault of the same subject, of one that the symptom follows from, or that explains it.
    """
    causes: dict[str, tuple[int, int]] = {}
    kept: list[list[Finding]] = []
    for index, result in enumerate(results):
        kept.append([])
        for finding in result.verdict.findings:
            suspects = (finding.subject, *finding.follows_from)
            found = min((causes[name] for name in suspects if name in causes), default=None)
            if found is not None and result.check_id in SYMPTOMS:
                _add_consequence(kept, found, f"{result.check_id}: {finding.subject}: {finding.found}")
                continue
            kept[index].append(finding)
            if finding.status is Status.FAULT and result.check_id in CAUSES:
                for name in (finding.subject, *finding.explains):
                    causes.setdefault(name, (index, len(kept[index]) - 1))
    return tuple(
        replace(result, verdict=_left(result.verdict, findings))
        for result, findings in zip(results, kept, strict=True)
    )


def _add_consequence(kept: list[list[Finding]], place: tuple[int, int], text: str) -> None:
    check, number = place
    cause = kept[check][number]
    kept[check][number] = replace(cause, consequences=(*cause.consequences, text))


def _left(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """A verdict all of whose findings follow from others has not seen what it looks at in order."""
    if verdict.findings and not findings:
        return Verdict("what it found follows from a fault above", skipped=True)
    return replace(verdict, findings=tuple(findings))
