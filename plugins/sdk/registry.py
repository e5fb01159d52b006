"""Finds back ends by entry points and by registration; loads exactly the one that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import TypeVar

from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError
from meshkit.telemetry.logging import get_logger
from plugins.sdk.backend import Backend, PluginInfo
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.load_failure import describe_failure, find_unresolved_symbol
from plugins.sdk.report_checks import find_contradictions
from plugins.sdk.versions import CONTRACT_VERSION, parse_version, version_in_range

log = get_logger(__name__)

ENTRY_POINT_GROUP = "chipmesh.device_plugins"
BackendFactory = Callable[[Mapping[str, str]], Backend]
T = TypeVar("T")

_registered: dict[str, BackendFactory] = {}


class UnknownBackend(InvalidArgument):
    """No back end has that name; the message lists what is installed and what failed to import."""


@dataclass(frozen=True)
class InstalledBackend:
    """A back end that can be named. `origin`: "registered" or the entry point's module:attribute."""

    name: str
    origin: str


@dataclass(frozen=True)
class VersionRow:
    """One line of the version matrix. `version`: what is here, "" if not reported; `allowed`: the range that
    the plugin was built for, "" for every version.
    """

    part: str
    version: str
    allowed: str


@dataclass(frozen=True)
class _Found:
    """A factory, and the package that brought it where it came by an entry point."""

    factory: BackendFactory
    distribution: Distribution | None = None


def register_backend(name: str, factory: BackendFactory) -> None:
    """Make `factory` known under `name`, before any entry point of that name. Registering again replaces
    it.
    """
    if not name:
        raise InvalidArgument("a back end needs a name", field="name")
    _registered[name] = factory


def list_backends() -> list[InstalledBackend]:
    """All names that `load_backend` knows, sorted. Imports no plugin."""
    found = {point.name: InstalledBackend(point.name, point.value) for point in _entry_points()}
    found.update({name: InstalledBackend(name, "registered") for name in _registered})
    return [found[name] for name in sorted(found)]


def load_backend(name: str, options: Mapping[str, str]) -> Backend:
    """Import and start one back end, and check its versions, devices and report. Imports no other plugin.

    Raises:
        UnknownBackend: no such name.
        FailedPrecondition: the plugin does not import, its factory raises, a version is outside its range
            (VERSION_MISMATCH), it lists no device (NO_DEVICE), or its report contradicts itself
            (CONTRADICTORY_REPORT).
        MeshError: as the factory raised it, for example InvalidArgument for an option.
    """
    backend = start_backend(name, options)
    info = read_info(name, backend)
    check_versions(info)
    check_report(name, backend, device_count=count_devices(name, backend))
    loaded = f"Backend {name} loaded successfully"
    log.info(loaded, plugin_version=info.plugin_version)
    return backend


def start_backend(name: str, options: Mapping[str, str]) -> Backend:
    """Import and start one back end without a look at its versions, devices and report: for tools that
    report on them.

    Raises:
        MeshError: as `load_backend`, but for those.
    """
    found = _find_factory(name)
    try:
        backend = found.factory(options)
    except MeshError as error:
        if find_unresolved_symbol(error) is None:
            raise
        raise _failed_to_start(name, error, found.distribution) from error
    except (Exception, SystemExit) as error:
        raise _failed_to_start(name, error, found.distribution) from error
    if not isinstance(backend, Backend):
        raise FailedPrecondition(
            f"the factory of backend {name!r} returned {type(backend).__name__}, not a plugins.sdk Backend",
            field="backend",
            reason="BACKEND_FAILED",
        )
    return backend


def read_info(name: str, backend: Backend) -> PluginInfo:
    """Who the plugin says it is. Raises FailedPrecondition where it cannot say."""
    info = _ask(name, "say who it is", backend.info)
    if not isinstance(info, PluginInfo):
        raise _wrong_answer(name, "info()", info, "PluginInfo")
    values = {field.name: getattr(info, field.name) for field in fields(info)}
    if wrong := [f"{key} is {value!r}" for key, value in values.items() if not isinstance(value, str)]:
        raise FailedPrecondition(
            f"info() of backend {name!r} has to hold texts: {', '.join(wrong)}",
            field="backend",
            reason="BACKEND_FAILED",
        )
    return info


def count_devices(name: str, backend: Backend) -> int:
    """How many devices the plugin lists: at least one.

    Raises:
        FailedPrecondition: NO_DEVICE: none. BACKEND_FAILED: it cannot list them.
    """
    count = _ask(name, "list its devices", lambda: len(backend.devices.list_devices()))
    if count == 0:
        raise FailedPrecondition(
            f"backend {name!r} lists no device: there is none here, or this process may not see it. Check "
            "that the driver is loaded and that its device files can be opened here (a container has to be "
            "given them), and that no visibility variable hides the device (those of an executor stand in "
            "executor.environment)",
            field="backend",
            reason="NO_DEVICE",
        )
    return count


def check_report(name: str, backend: Backend, *, device_count: int | None = None) -> None:
    """Refuse a report that cannot be read, or contradicts itself, the catalogue or the number of devices.

    Raises:
        FailedPrecondition: CONTRADICTORY_REPORT: all contradictions are listed. BACKEND_FAILED: there is no
            report to read.
    """
    report = _ask(name, "report its capabilities", backend.capabilities)
    if not isinstance(report, CapabilityReport):
        raise _wrong_answer(name, "capabilities()", report, "CapabilityReport")
    found = _ask(
        name, "give a readable report", lambda: find_contradictions(report, device_count=device_count)
    )
    if found:
        raise FailedPrecondition(
            f"the capability report of backend {name!r} has {len(found)} contradiction"
            f"{'s' if len(found) > 1 else ''}: {'; '.join(found)}. Nothing is planned by such a report: "
            "install a version of the plugin that corrects it",
            field="backend",
            reason="CONTRADICTORY_REPORT",
        )
    _ask(name, "give a readable report", report.to_proto)


def describe_plugin_failure(name: str, verb: str, error: BaseException) -> FailedPrecondition:
    """What is raised where a plugin that has started `verb`s, and fails in it."""
    return FailedPrecondition(
        f"backend {name!r} does not {verb}: {_one_line(describe_failure(error))}",
        field="backend",
        reason="BACKEND_FAILED",
        **_symbol_facts(error),
    )


def _ask(name: str, verb: str, call: Callable[[], T]) -> T:
    """The answer of a plugin. Its own MeshError passes, whatever else it raises is described."""
    try:
        return call()
    except MeshError:
        raise
    except (Exception, SystemExit) as error:
        raise describe_plugin_failure(name, verb, error) from error


def _wrong_answer(name: str, call: str, answer: object, wanted: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{call} of backend {name!r} returned {type(answer).__name__}, not a plugins.sdk {wanted}",
        field="backend",
        reason="BACKEND_FAILED",
    )


def _one_line(text: str) -> str:
    """Vendors' messages run over several lines; an error of ours is one."""
    return " ".join(text.split())


def version_matrix(info: PluginInfo) -> tuple[VersionRow, ...]:
    """What the plugin was built for beside what is here, one row for each part."""
    library = (info.collective_library_version, info.collective_library_range)
    return (
        VersionRow("contract", CONTRACT_VERSION, info.contract_range),
        VersionRow("runtime", info.runtime_version, info.runtime_range),
        VersionRow("collective library", *library),
        VersionRow("framework", info.framework_version, info.framework_range),
    )


def check_versions(info: PluginInfo) -> None:
    """Raises FailedPrecondition that names both versions where one lies outside the range the plugin
    declares, or where the plugin was built for another major version of the contract.
    """
    _check_contract_major(info)
    for row in version_matrix(info):
        if not row.allowed:
            continue
        if not row.version or not _in_range(info.name, row):
            raise _mismatch(info, row.part, wanted=row.allowed, found=row.version)


def _check_contract_major(info: PluginInfo) -> None:
    """A range alone does not do: its default is this SDK's, also for a plugin of another major version."""
    try:
        built_for = parse_version(info.contract_version)
    except ValueError as error:
        raise FailedPrecondition(
            f"backend {info.name!r} says that it was built for contract {info.contract_version!r}: {error}",
            field="backend",
            reason="VERSION_MISMATCH",
        ) from error
    if built_for.major != parse_version(CONTRACT_VERSION).major:
        raise _mismatch(info, "contract", wanted=info.contract_version, found=CONTRACT_VERSION)


def _mismatch(info: PluginInfo, part: str, *, wanted: str, found: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"backend {info.name!r} {info.plugin_version} was built for {part} {wanted}; here it is "
        f"{found or 'not reported'}. Install a plugin and a {part} that go together",
        field="backend",
        reason="VERSION_MISMATCH",
        wanted=wanted,
        found=found,
    )


def _in_range(name: str, row: VersionRow) -> bool:
    try:
        return version_in_range(row.version, row.allowed)
    except ValueError as error:
        raise FailedPrecondition(
            f"backend {name!r} reports a {row.part} version that cannot be compared: {error}",
            field="backend",
            reason="VERSION_MISMATCH",
            wanted=row.allowed,
            found=row.version,
        ) from error


def _failed_to_start(
    name: str, error: BaseException, distribution: Distribution | None
) -> FailedPrecondition:
    return FailedPrecondition(
        f"backend {name!r} failed to start: {_one_line(describe_failure(error, distribution))}",
        field="backend",
        reason="BACKEND_FAILED",
        **_symbol_facts(error),
    )


def _symbol_facts(error: BaseException) -> dict[str, object]:
    symbol = find_unresolved_symbol(error)
    return {} if symbol is None else {"library": symbol.library, "symbol": symbol.symbol}


def _entry_points() -> Sequence[EntryPoint]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _find_factory(name: str) -> _Found:
    if name in _registered:
        return _Found(_registered[name])
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        raise _unknown(name)
    if len({(point.value, _package(point)) for point in points}) > 1:
        offers = sorted({_describe_point(point) for point in points})
        raise FailedPrecondition(
            f"backend {name!r} is offered by several packages: {', '.join(offers)}; uninstall all but one",
            field="backend",
            reason="BACKEND_AMBIGUOUS",
        )
    point = points[0]
    try:
        return _Found(point.load(), point.dist)
    except (Exception, SystemExit) as error:
        raise FailedPrecondition(
            f"backend {name!r} ({point.value}) cannot be imported: "
            f"{_one_line(describe_failure(error, point.dist))}",
            field="backend",
            reason="BACKEND_IMPORT_FAILED",
            **_symbol_facts(error),
        ) from error


def _package(point: EntryPoint) -> str:
    """The name of the package that brought it, "" where none is known; without its version: one that lies
    twice on the path is no other package.
    """
    return "" if point.dist is None else str(point.dist.metadata["Name"])


def _describe_point(point: EntryPoint) -> str:
    """module:attribute, and the package that brought it where it is known."""
    if point.dist is None:
        return point.value
    return f"{point.value} of {_package(point)} {point.dist.version}"


def _why_not_importable(point: EntryPoint) -> str:
    """Why a plugin does not import, with the way out; "" where it does."""
    try:
        point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor's import may fail in any way
        return _one_line(describe_failure(error, point.dist))
    return ""


def _unknown(name: str) -> UnknownBackend:
    good, bad = list(_registered), []
    # Only here every plugin is imported: nothing is being served, and the reader wants to know why one is
    # not there.
    for point in _entry_points():
        if point.name in _registered:
            continue
        problem = _why_not_importable(point)
        if problem:
            bad.append(f"{point.name} ({problem})")
        else:
            good.append(point.name)
    message = f"backend {name!r} is unknown; installed: {', '.join(sorted(good)) or 'none'}"
    if bad:
        message += f"; installed but not importable: {'; '.join(sorted(bad))}"
    message += f". A plugin's package offers itself by an entry point of the group {ENTRY_POINT_GROUP}"
    return UnknownBackend(message, field="backend", reason="UNKNOWN_BACKEND")
