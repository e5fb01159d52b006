#!/usr/bin/env python3
"""Licences of everything that chipmesh installs: `python scripts/licenses.py` writes docs/licenses.md.

Only what constraints.txt pins is listed: a machine may have a torch that brings a vendor's own packages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "docs/licenses.md"

ALLOWED = frozenset({
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC",
    "LLVM-exception", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Unlicense", "Zlib",
})  # fmt: skip
"""SPDX ids. Of these only MPL-2.0 asks something back: changes of its own files, of which we make none."""

CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
WORDS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
}
"""What older packages write into their field `License`, as SPDX ids."""

READ = {
    "forbiddenfruit": "GPL-3.0-or-later OR MIT",
    "kubernetes-validate": "Apache-2.0",
    "promql-parser": "MIT",
}
"""Read in the packages' own files, where the metadata do not say which licence, or whether one may choose."""


@dataclass(frozen=True)
class Package:
    """license: an SPDX expression where the package says one we know, else its own words."""

    name: str
    version: str
    license: str


def installed_packages() -> list[Package]:
    """What constraints.txt pins and this environment has, by name: everything that setup.sh installs."""
    found = []
    for name in sorted(pinned_names()):
        try:
            about = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue  # Of another Python only.
        found.append(Package(name, about["Version"], READ.get(name) or license_of(about)))
    return found


def pinned_names() -> set[str]:
    """Of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[0].strip() for line in lines if "==" in line and not line.startswith("#")}


def license_of(about: metadata.PackageMetadata) -> str:
    """The licence expression (PEP 639), else the classifiers, else the field of old."""
    if "License-Expression" in about:
        return about["License-Expression"]
    kinds = [
        text.rpartition(" :: ")[2]
        for text in about.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    if kinds and all(kind in CLASSIFIERS for kind in kinds):
        return " AND ".join(CLASSIFIERS[kind] for kind in kinds)
    words = (about.get_all("License") or [""])[0].strip().splitlines()
    return WORDS.get(words[0], words[0]) if words else "unknown"


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression can be met by licences of ALLOWED alone: all of an AND, any of an OR."""
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    value, rest = _either(tokens)
    return value and not rest


def _either(tokens: list[str]) -> tuple[bool, list[str]]:
    value, rest = _both(tokens)
    while rest and rest[0] == "OR":
        other, rest = _both(rest[1:])
        value = value or other
    return value, rest


def _both(tokens: list[str]) -> tuple[bool, list[str]]:
    value, rest = _one(tokens)
    while rest and rest[0] in ("AND", "WITH"):
        other, rest = _one(rest[1:])
        value = value and other
    return value, rest


def _one(tokens: list[str]) -> tuple[bool, list[str]]:
    if not tokens:
        return False, []
    if tokens[0] != "(":
        return tokens[0] in ALLOWED, tokens[1:]
    value, rest = _either(tokens[1:])
    return (value, rest[1:]) if rest and rest[0] == ")" else (False, rest)


def render(packages: Iterable[Package]) -> str:
    """The list as Markdown."""
    rows = [f"| {package.name} | {package.version} | {package.license} |" for package in packages]
    head = (
        "# Licences of what chipmesh installs\n\n"
        "Written by `bash scripts/sbom.sh`, which also writes the full bill of materials "
        "(`dist/sbom.cdx.json`).\nA test checks that each licence is of the allowed set. chipmesh itself is "
        "Apache-2.0. Versions are those of\nconstraints.txt on one Python.\n\n"
        "| package | version | licence |\n|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def main() -> int:
    """Writes the list; 1 where a licence is not allowed."""
    packages = installed_packages()
    LIST.write_text(render(packages), encoding="utf-8")
    print(f"licenses: {LIST.relative_to(ROOT)} ({len(packages)} packages)")
    bad = [package for package in packages if not is_allowed(package.license)]
    for package in bad:
        print(
            f"licenses: {package.name} {package.version}: {package.license!r} is not allowed", file=sys.stderr
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
