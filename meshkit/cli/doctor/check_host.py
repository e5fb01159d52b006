"""Checks of the host: what others take of it, and links that chips share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshkit.cli.doctor.facts import ChipFacts, Facts
from meshkit.cli.doctor.finding import Finding, Verdict, named, skipped, verdict, warning

OTHERS_SHARE = 0.25
STOLEN_SHARE = 0.05
SLOW_COPY = 0.6
"""Of the best that was ever measured here: two copies on one memory bus take about half each."""


def check_contention(facts: Facts) -> Verdict:
    """Processors and memory bandwidth are the mesh's own."""
    host = facts.host
    if host is None or host.copy_bytes_per_s is None:
        return skipped("this host was not looked at")
    findings: list[Finding] = []
    rate, best = host.copy_bytes_per_s, host.best_copy_bytes_per_s
    slow = best is not None and rate < SLOW_COPY * best
    memory = f"a copy of memory runs at {rate / 1e9:.1f} GB/s"
    memory += f", the best here was {best / 1e9:.1f}" if best is not None else ", the first one measured here"
    if host.others > OTHERS_SHARE * host.processors:
        who = named([f"{each.command[:60]} (pid {each.pid}, {each.processors:.1f})" for each in host.busiest])
        seen = who if host.busiest else "none that is to be seen from here"
        text = f"others take {host.others:.1f} of {host.processors} processors: {seen}"
        mend = "end them, move them, or confine them (cpuset); the mesh's steps wait for them"
        findings.append(warning("this host", f"{text}; {memory}" if slow else text, mend))
    elif slow:
        mend = "look for what moves much memory on this host, or on others of its hypervisor"
        findings.append(warning("this host", f"others take its memory's bandwidth: {memory}", mend))
    if host.stolen > STOLEN_SHARE * host.processors:
        text = f"the hypervisor withholds {host.stolen:.1f} of {host.processors} processors (steal)"
        findings.append(warning("this host", text, "give the machine processors of its own"))
    return verdict(f"others take {host.others:.1f} of {host.processors} processors; {memory}", findings)


def check_chip_links(facts: Facts) -> Verdict:
    """Each chip has a link to the host, and an IOMMU group, of its own."""
    if not facts.chips:
        return skipped("no accelerator is on this host's PCI bus")
    findings: list[Finding] = []
    told: list[set[str]] = []
    for kind, harm, key, addresses in _shared_places(facts.chips):
        # What shares a port shares its root complex as well: said once.
        if any(addresses <= each for each in told):
            continue
        told.append(addresses)
        findings.append(
            warning(
                f"chips {named(sorted(addresses))}",
                f"are behind one {kind} ({key}): {harm}",
                "move one to another slot, or plan so that they do not load or exchange at the same time",
            )
        )
    return verdict(f"{len(facts.chips)} chips, each with a link of its own", findings)


def _shared_places(chips: Sequence[ChipFacts]) -> Iterator[tuple[str, str, str, set[str]]]:
    """(kind, harm, which one, chips at it) of each place that several chips share, the narrowest first."""
    kinds = (
        ("root port", "they share one link to the host", [chip.port or "" for chip in chips]),
        (
            "IOMMU group",
            "they cannot be given to different machines or containers",
            [chip.iommu_group or "" for chip in chips],
        ),
        (
            "root complex",
            "their copies to and from the host share its bandwidth",
            [chip.root for chip in chips],
        ),
    )
    for kind, harm, keys in kinds:
        for key in sorted(set(keys) - {""}):
            addresses = {chip.address for chip, own in zip(chips, keys, strict=True) if own == key}
            if len(addresses) > 1:
                yield kind, harm, key, addresses
