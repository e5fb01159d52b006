"""Checks of what configurations say: leases, and listeners that are open to others."""

from __future__ import annotations

from collections.abc import Iterator

from meshkit.address import is_local
from meshkit.cli.doctor.facts import Facts, Target
from meshkit.cli.doctor.finding import Finding, Verdict, fault, skipped, verdict, warning

LEAST_BEATS = 3
"""Heartbeats in a lease: with two, a single late one ends it."""
LONGEST_LEASE_S = 10.0


def check_leases(facts: Facts) -> Verdict:
    """Leases are neither so short that a late heartbeat ends one nor so long that the dead are waited for."""
    known = [target for target in facts.targets if target.config]
    if not known:
        return skipped("no configuration is known; name the services' files with --config")
    schedulers = [target for target in known if target.kind == "scheduler"]
    workers = [target for target in known if target.kind == "worker"]
    findings = [finding for target in schedulers for finding in _lease_findings(target)]
    floor_s = max((_seconds(target, "step_deadline_floor_s") or 0.0 for target in schedulers), default=0.0)
    findings += [finding for target in workers for finding in _patience_findings(target, floor_s=floor_s)]
    return verdict(f"{len(schedulers)} schedulers and {len(workers)} workers agree", findings)


def _seconds(target: Target, *path: str) -> float | None:
    value: object = target.config
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return float(value) if isinstance(value, (int, float)) else None


def _lease_findings(target: Target) -> Iterator[Finding]:
    beat_s, lease_s = _seconds(target, "heartbeat_interval_s"), _seconds(target, "lease_duration_s")
    if beat_s is None or lease_s is None:
        return
    if lease_s < LEAST_BEATS * beat_s:
        yield warning(
            target.name,
            f"a lease of {lease_s:g} s holds fewer than {LEAST_BEATS} heartbeats of {beat_s:g} s: a late one "
            "costs a worker its place",
            f"set lease_duration_s to {LEAST_BEATS * beat_s:g} or more, or heartbeat_interval_s lower",
        )
    elif lease_s > LONGEST_LEASE_S:
        yield warning(
            target.name,
            f"a lease of {lease_s:g} s: a worker that hangs keeps its requests so long",
            "lower lease_duration_s; 1 s is the default",
        )


def _patience_findings(target: Target, *, floor_s: float) -> Iterator[Finding]:
    """What supervisor and scheduler wait for must be in order: the scheduler gives a step up first."""
    hung_s = _seconds(target, "executor", "hung_after_s")
    if hung_s is not None and hung_s < floor_s:
        yield warning(
            target.name,
            f"executor.hung_after_s is {hung_s:g}, less than step_deadline_floor_s, {floor_s:g}: "
            "the executor is replaced at a step that the scheduler still waits for",
            f"set executor.hung_after_s above {floor_s:g}",
        )
    probe_s = _seconds(target, "executor", "probe_interval_s")
    silent_s = _seconds(target, "executor", "unresponsive_after_s")
    if probe_s is not None and silent_s is not None and silent_s < LEAST_BEATS * probe_s:
        yield warning(
            target.name,
            f"executor.unresponsive_after_s is {silent_s:g}: fewer than {LEAST_BEATS} probes",
            f"set executor.unresponsive_after_s to {LEAST_BEATS * probe_s:g} or more",
        )


def check_exposure(facts: Facts) -> Verdict:
    """What others can reach demands a certificate or a key."""
    known = [target for target in facts.targets if target.config]
    if not known:
        return skipped("no configuration is known; name the services' files with --config")
    findings = [finding for target in known for finding in _exposure_findings(target)]
    opened = [
        target.name for target in known if any(_is_open(target, field) for field, _ in _listeners(target))
    ]
    text = f"{len(opened)} of {len(known)} services listen beyond this host, with certificates or keys"
    return verdict(text if opened else f"{len(known)} services listen on this host only", findings)


def _exposure_findings(target: Target) -> Iterator[Finding]:
    if target.kind == "gateway":
        for field, address in _listeners(target):
            if _is_open(target, field):
                yield from _public_findings(target, field, address)
        return
    for field, address in _listeners(target):
        if not _is_open(target, field) or target.config.get("tls"):
            continue
        if target.config.get("insecure_network"):
            yield warning(
                target.name,
                f"{field} {address} takes anyone's calls in plain text, since insecure_network says that the "
                "network is trusted",
                "give it certificates (`tls`; chipmesh certs create), and take insecure_network away",
            )
        else:
            yield fault(
                target.name,
                f"{field} {address} takes anyone's calls in plain text",
                "give it certificates (`tls`; chipmesh certs create), or let it listen on loopback",
            )


def _public_findings(target: Target, field: str, address: str) -> Iterator[Finding]:
    if not (target.config.get("api_keys") or target.config.get("api_keys_file")):
        make = warning if target.config.get("allow_anonymous") else fault
        yield make(
            target.name,
            f"{field} {address} takes anyone's requests: it has no api_keys",
            "give it keys (chipmesh keys new NAME), or let it listen on loopback",
        )
    elif not target.config.get("listen_tls"):
        yield warning(
            target.name,
            f"{field} {address} takes keys in plain text",
            "give it a certificate (`listen_tls`), or put a proxy with TLS in front of it",
        )


def _listeners(target: Target) -> Iterator[tuple[str, str]]:
    """(field, address) of each listener that serves more than health and metrics."""
    config = target.config
    if target.kind != "worker":
        yield "listen", str(config.get("listen") or "127.0.0.1:0")
    if config.get("openai_listen"):
        yield "openai_listen", str(config["openai_listen"])
    executor = config.get("executor")
    if isinstance(executor, dict):
        yield "executor.listen", str(executor.get("listen") or "127.0.0.1:0")


def _is_open(target: Target, field: str) -> bool:
    """Whether other hosts can reach it."""
    return not is_local(dict(_listeners(target))[field])
