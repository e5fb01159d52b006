"""Finds back ends by entry points and by registration; loads exactly the one that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError
from meshkit.telemetry.logging import get_logger
from plugins.sdk.backend import Backend, PluginInfo
from plugins.sdk.versions import CONTRACT_VERSION, version_in_range

log = get_logger(__name__)

ENTRY_POINT_GROUP = "chipmesh.device_plugins"
BackendFactory = Callable[[Mapping[str, str]], Backend]

_registered: dict[str, BackendFactory] = {}


class UnknownBackend(InvalidArgument):
    """No back end has that name; the message lists what is installed and what failed to import."""


@dataclass(frozen=True)
class InstalledBackend:
    """A back end that can be named. `origin`: "registered" or the entry point's module:attribute."""

    name: str
    origin: str


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
    """Import and start one back end, and check the versions that it declares. Imports no other plugin.

    Raises:
        UnknownBackend: no such name.
        FailedPrecondition: the plugin does not import, its factory raises, or a version is outside its range.
        MeshError: as the factory raised it, for example InvalidArgument for an option.
    """
    factory = _find_factory(name)
    try:
        backend = factory(options)
    except MeshError:
        raise
    except Exception as error:
        raise FailedPrecondition(
            f"backend {name!r} failed to start: {_describe(error)}. {_remedy(error)}",
            field="backend",
            reason="BACKEND_FAILED",
        ) from error
    if not isinstance(backend, Backend):
        raise FailedPrecondition(
            f"the factory of backend {name!r} returned {type(backend).__name__}, not a plugins.sdk Backend",
            field="backend",
            reason="BACKEND_FAILED",
        )
    info = backend.info()
    check_versions(info)
    loaded = f"Backend {name} loaded successfully"
    log.info(loaded, plugin_version=info.plugin_version)
    return backend


def check_versions(info: PluginInfo) -> None:
    """Raises FailedPrecondition that names both versions where one lies outside the range the plugin
    declares.
    """
    matrix = (
        ("contract", CONTRACT_VERSION, info.contract_range),
        ("runtime", info.runtime_version, info.runtime_range),
        ("collective library", info.collective_library_version, info.collective_library_range),
        ("framework", info.framework_version, info.framework_range),
    )
    for what, version, allowed in matrix:
        if not allowed:
            continue
        if not version or not _in_range(info.name, what, version, allowed):
            raise FailedPrecondition(
                f"backend {info.name!r} {info.plugin_version} was built for {what} {allowed}; here it is "
                f"{version or 'not reported'}. Install a plugin and a {what} that go together",
                field="backend",
                reason="VERSION_MISMATCH",
                wanted=allowed,
                found=version,
            )


def _in_range(name: str, what: str, version: str, allowed: str) -> bool:
    try:
        return version_in_range(version, allowed)
    except ValueError as error:
        raise FailedPrecondition(
            f"backend {name!r} reports a {what} version that cannot be compared: {error}",
            field="backend",
            reason="VERSION_MISMATCH",
        ) from error


def _entry_points() -> Sequence[EntryPoint]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _find_factory(name: str) -> BackendFactory:
    if name in _registered:
        return _registered[name]
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        raise _unknown(name)
    distinct = {point.value for point in points}
    if len(distinct) > 1:
        raise FailedPrecondition(
            f"backend {name!r} is offered by several packages: {', '.join(sorted(distinct))}; "
            "uninstall all but one",
            field="backend",
            reason="BACKEND_AMBIGUOUS",
        )
    factory, problem = _import_factory(points[0])
    if factory is None:
        raise FailedPrecondition(
            f"backend {name!r} ({points[0].value}) cannot be imported: {problem}",
            field="backend",
            reason="BACKEND_IMPORT_FAILED",
        )
    return factory


def _import_factory(point: EntryPoint) -> tuple[BackendFactory | None, str]:
    """The factory and "", or None and why it does not import with the way out."""
    try:
        factory: BackendFactory = point.load()
    except Exception as error:  # noqa: BLE001 - a vendor's import may fail in any way; the caller reports it
        return None, f"{_describe(error)}. {_remedy(error)}"
    return factory, ""


def _unknown(name: str) -> UnknownBackend:
    good, bad = list(_registered), []
    # Only here every plugin is imported: nothing is being served, and the reader wants to know why one is
    # not there.
    for point in _entry_points():
        if point.name in _registered:
            continue
        factory, problem = _import_factory(point)
        if factory is None:
            bad.append(f"{point.name} ({problem})")
        else:
            good.append(point.name)
    message = f"backend {name!r} is unknown; installed: {', '.join(sorted(good)) or 'none'}"
    if bad:
        message += f"; installed but not importable: {'; '.join(sorted(bad))}"
    message += f". A plugin's package offers itself by an entry point of the group {ENTRY_POINT_GROUP}"
    return UnknownBackend(message, field="backend", reason="UNKNOWN_BACKEND")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"Install the package that holds {error.name!r} in this interpreter, or name the interpreter "
            "that has it in executor.python"
        )
    if isinstance(error, ImportError | OSError):
        return "Check that the vendor's runtime is installed and that LD_LIBRARY_PATH leads to its libraries"
    return "See the cause above; the plugin's own documentation says what it needs"
