"""Vendor packages that were released together; others end in undefined symbols or hangs, later. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from meshkit.errors import FailedPrecondition
from plugins.sdk.versions import version_in_range

STACKS: Mapping[str, Mapping[str, str]] = {
    "vLLM-Kunlun": {
        "torch": ">=2.5.1,<2.6",
        "kunlun_ops": ">=0.1.58,<0.1.205",
        "xspeedgate_ops": ">=1.1,<1.2",
        "cocopod": ">=1.1,<1.2",
    },
    "sglang-kunlun": {
        "torch": ">=2.9,<2.10",
        "kunlun_ops": ">=0.1.205,<0.2",
        "xspeedgate_ops": ">=1.2,<1.4",
        "cocopod": ">=1.3,<1.4",
    },
}
"""Names of the public releases that they come from, with ranges by package."""


def check_stack(versions: Mapping[str, str]) -> str:
    """The name of the release that all of `versions` belong to.

    Raises:
        FailedPrecondition: no release has all of them, or a version is not known.
    """
    for name, ranges in STACKS.items():
        if all(_fits(versions.get(package, ""), allowed) for package, allowed in ranges.items()):
            return name
    here = ", ".join(f"{package} {versions.get(package) or 'of unknown version'}" for package in _packages())
    known = "; ".join(
        f"{name}: " + ", ".join(f"{package} {allowed}" for package, allowed in ranges.items())
        for name, ranges in STACKS.items()
    )
    raise FailedPrecondition(
        f"the vendor's packages do not go together: here are {here}; releases are {known}. Install one of "
        "them, or take the risk by the backend option check_versions=false",
        field="backend",
        reason="VERSION_MISMATCH",
        found=here,
        wanted=known,
    )


def _packages() -> list[str]:
    return list(next(iter(STACKS.values())))


def _fits(version: str, allowed: str) -> bool:
    try:
        return version_in_range(version, allowed)
    except ValueError:
        return False
