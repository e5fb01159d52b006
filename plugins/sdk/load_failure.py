"""Why a plugin did not load, in words that lead out of it: missing modules, and libraries that do not fit
together.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import Distribution

from plugins.sdk.versions import CONTRACT_VERSION, version_in_range

_SYMBOL = re.compile(r"(?P<library>\S+?):\s+(?:undefined symbol|symbol not found):?\s+(?P<symbol>[^\s,]+)")
# glibc: "LIBRARY: version `NAME' not found (required by USER)"; USER is the one built for something newer.
_SYMBOL_VERSION = re.compile(
    r"version [`'](?P<symbol>[^`']+)' not found \(required by (?P<library>[^)\s]+)\)"
)
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?(?P<range>[^;()]*)\)?\s*$")
_FRAMEWORK = "torch"


@dataclass(frozen=True)
class UnresolvedSymbol:
    """A library wants a symbol that what it is linked with does not have."""

    library: str
    symbol: str


def find_unresolved_symbol(error: BaseException) -> UnresolvedSymbol | None:
    """The unresolved symbol that `error`, or what caused it, speaks of; None where it is something else."""
    for each in _causes(error):
        text = str(each)
        match = _SYMBOL.search(text) or _SYMBOL_VERSION.search(text)
        if match is not None:
            return UnresolvedSymbol(match["library"], match["symbol"])
    return None


def describe_failure(error: BaseException, distribution: Distribution | None = None) -> str:
    """The error, its cause as far as it is a known one, and what to do.

    distribution: the package that brought the plugin, where one is known; its requirements say what it was
    built for.
    """
    symbol = find_unresolved_symbol(error)
    if symbol is None:
        return f"{type(error).__name__}: {error}. {_remedy(error)}"
    return (
        f"library {symbol.library} needs symbol {symbol.symbol}, which is not there (undefined symbol): it "
        f"was built for another version of what it is linked with. {_built_for(distribution)}; running here: "
        f"{_running()}. Install a plugin, a runtime and a framework that go together"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _built_for(distribution: Distribution | None) -> str:
    if distribution is None:
        return "What it was built for is not known: the plugin was not installed as a package"
    package = f"{distribution.metadata['Name']} {distribution.version}"
    ranges = list(_requirements(distribution))
    misfits = [
        f"{name} {allowed} (here {found or 'not installed'})" for name, allowed, found in ranges
        if not _fits(found, allowed)
    ]  # fmt: skip
    if misfits:
        return f"{package} was built for {', '.join(misfits)}"
    named = [f"{name} {allowed}" for name, allowed, _ in ranges if name.lower() == _FRAMEWORK]
    return f"{package} declares {', '.join(named) or 'no framework range'}, which fits"


def _requirements(distribution: Distribution) -> Iterator[tuple[str, str, str]]:
    """(name, range, version installed here or "") of each unconditional requirement with a range."""
    for line in distribution.requires or ():
        match = _REQUIREMENT.match(line)
        if match is None or not match["range"].strip():
            continue
        yield match["name"], match["range"].strip(), _installed(match["name"])


def _fits(version: str, allowed: str) -> bool:
    if not version:
        return False
    try:
        return version_in_range(version, allowed)
    except ValueError:
        return False  # A form of range that is not ours: shown, so that a person compares.


def _running() -> str:
    parts = [f"contract {CONTRACT_VERSION}", f"Python {platform.python_version()}"]
    framework = _installed(_FRAMEWORK)
    return ", ".join([*parts, f"{_FRAMEWORK} {framework}"] if framework else parts)


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"Install the package that holds {error.name!r} in this interpreter, or name the interpreter "
            "that has it in executor.python"
        )
    if isinstance(error, ImportError | OSError):
        return "Check that the vendor's runtime is installed and that LD_LIBRARY_PATH leads to its libraries"
    return "See the cause above; the plugin's own documentation says what it needs"
