"""Checks of certificates: in their time, of the right role, with their own key, rightly signed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from meshkit.cli.doctor.facts import CertificateFacts, Facts
from meshkit.cli.doctor.finding import Finding, Verdict, fault, named, skipped, verdict, warning
from meshkit.rpc.peers import server_name
from meshkit.rpc.policy import Role

ROLES = ("gateway", "scheduler", "worker", "operator")
LEAST_LIFE = 1 / 3
"""Of its life; `chipmesh certs create` makes new ones of those that have less left."""
OTHERS_MAY = 0o027
"""Read, write or use by everybody; write by the group. A group that may read is how secrets are mounted."""
GROUP_MAY = 0o077


def check_certificates(facts: Facts) -> Verdict:
    """Each set of files is one that its peers accept, now and for some time."""
    if not facts.certificates:
        return skipped("no certificates are known: no `tls` in a configuration, no --tls DIR")
    findings = [
        replace(finding, explains=each.users)
        for each in facts.certificates
        for finding in _findings(each, now=facts.now)
    ]
    ends = [each.not_after for each in facts.certificates if each.not_after is not None]
    until = f", the first until {min(ends):%Y-%m-%d}" if ends else ""
    return verdict(f"{len(facts.certificates)} certificates are right{until}", findings)


def _findings(each: CertificateFacts, *, now: datetime) -> Iterator[Finding]:
    if each.error is not None:
        yield fault(
            each.folder, f"cannot be read: {each.error}", "make it anew: chipmesh certs create DIR ..."
        )
        return
    yield from _mode_findings(each)
    yield from _time_findings(each, now=now)
    if each.is_authority:
        return
    if not each.key_matches:
        text = f"{each.key_file} is not the key of {each.subject}"
        yield fault(each.folder, text, "copy both from one folder of `chipmesh certs create`, or rotate")
    if not each.authority_matches:
        text = f"{each.subject} was not signed by an authority of its authority.pem"
        yield fault(
            each.folder, text, "sign it anew (chipmesh certs rotate DIR), or give it the right authority.pem"
        )
    if not each.is_public:
        yield from _role_findings(each)


def _mode_findings(each: CertificateFacts) -> Iterator[Finding]:
    forbidden = each.key_mode & (GROUP_MAY if each.is_authority else OTHERS_MAY)
    if forbidden:
        yield fault(
            each.folder,
            f"others may use its key: {each.key_file} has mode {each.key_mode:04o}",
            f"chmod 600 {each.key_file}; who may have read it can pass for it: chipmesh certs rotate DIR",
        )


def _time_findings(each: CertificateFacts, *, now: datetime) -> Iterator[Finding]:
    if each.not_before is None or each.not_after is None:
        return
    mend = "make new ones, which running services read by themselves: chipmesh certs rotate DIR"
    if each.is_authority:
        mend = "make a new authority: chipmesh certs rotate DIR --authority"
    if now > each.not_after:
        yield fault(each.folder, f"{each.subject} has expired at {each.not_after:%Y-%m-%d %H:%M} UTC", mend)
    elif now < each.not_before:
        text = f"{each.subject} is valid from {each.not_before:%Y-%m-%d %H:%M} UTC on, later than now"
        yield fault(
            each.folder, text, "look at this host's clock; then make it anew: chipmesh certs rotate DIR"
        )
    elif each.not_after - now < LEAST_LIFE * (each.not_after - each.not_before):
        left = (each.not_after - now).days
        yield warning(each.folder, f"{each.subject} expires in {left} days", mend)


def _role_findings(each: CertificateFacts) -> Iterator[Finding]:
    mend = "make it with `chipmesh certs create DIR --ROLE NAME`"
    if each.role not in ROLES:
        text = f"{each.subject} names no role (chipmesh://ROLE/NAME; roles: {named(ROLES)})"
        yield fault(each.folder, text, mend)
    elif each.expected_role is not None and each.role != each.expected_role:
        text = f"it is of role {each.role}, where a {each.expected_role} shows it"
        yield fault(each.folder, text, mend)
    elif each.expected_name is not None and each.name != each.expected_name:
        text = f"it is of {each.role} {each.name}, where {each.expected_name} shows it: that is refused"
        yield fault(each.folder, text, mend)
    elif missing := [name for name in _dns_names_of(each) if name not in each.dns_names]:
        text = f"it lacks the DNS name {missing[0]} (it has {named(each.dns_names)}): clients refuse it"
        yield fault(each.folder, text, mend)


def _dns_names_of(each: CertificateFacts) -> tuple[str, ...]:
    """By which clients look for its role, and for this very peer."""
    role = Role(each.role)
    return server_name(role), server_name(role, each.name)
