"""Versions of plugins, runtimes and the contract: parsing, comparison, and the ranges that a plugin
declares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

CONTRACT_VERSION = "1.0"
"""Version of the device-plugin contract that this SDK holds, "MAJOR.MINOR"."""

_VERSION = re.compile(r"^\s*v?(?P<release>\d+(?:\.\d+)*)(?P<suffix>(?:[-_.]?[a-zA-Z]|[+-])\S*)?\s*$")
_CLAUSE = re.compile(r"^(>=|<=|==|!=|<|>)\s*(\S+)$")


@dataclass(frozen=True)
class Version:
    """A parsed version: `release` is its numbers, trailing zeros left out; `suffix` is what follows ("" if
    none).

    Compared by release alone: a development build of 1.2.0 has what 1.2.0 has, and a vendor's suffix such as
    "+gabc" or "_post1" orders nothing.
    """

    release: tuple[int, ...]
    suffix: str = ""

    @property
    def major(self) -> int:
        """The first number."""
        return self.release[0] if self.release else 0

    def __str__(self) -> str:
        return ".".join(map(str, self.release or (0,))) + self.suffix


def parse_version(text: str) -> Version:
    """Parse "1.2.0", "1.2.0.dev3+gabc", "v2.5.1+cpu" or "5.0.21.26".

    Raises:
        ValueError: the text does not begin with numbers.
    """
    match = _VERSION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no version: it has to begin with numbers such as 1.2")
    numbers = [int(part) for part in match["release"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return Version(tuple(numbers), match["suffix"] or "")


def version_in_range(version: str, allowed: str) -> bool:
    """Whether `version` lies in `allowed`, clauses such as ">=2.5,<3"; an empty range allows every version.

    Raises:
        ValueError: a version or a clause does not parse.
    """
    release = parse_version(version).release
    return all(_holds(release, clause.strip()) for clause in allowed.split(",") if clause.strip())


def _holds(release: tuple[int, ...], clause: str) -> bool:
    match = _CLAUSE.match(clause)
    if match is None:
        raise ValueError(f"{clause!r} is no version clause: write >=, <=, ==, !=, < or > and a version")
    bound = parse_version(match[2]).release
    return {
        ">=": release >= bound,
        "<=": release <= bound,
        "==": release == bound,
        "!=": release != bound,
        "<": release < bound,
        ">": release > bound,
    }[match[1]]


def installed_version(distribution: str) -> str:
    """The version of an installed package, such as a plugin's own; "0+source" where it runs from its source
    tree and was never installed.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "0+source"
