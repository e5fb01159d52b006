"""What the tools of this package share: which back end, who it is, and errors of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.cli.tools import EMULATE
from meshkit.errors import InvalidArgument, MeshError
from plugins.sdk.backend import Backend, PluginInfo
from plugins.sdk.registry import ENTRY_POINT_GROUP, UnknownBackend, list_backends

_OPTIONS = "backend_options."
_EMULATE_FLAG = f"--{EMULATE}"


@dataclass(frozen=True)
class BackendChoice:
    """A back end by name, with the options that its factory gets."""

    name: str
    options: Mapping[str, str]


def identity_of(info: PluginInfo, backend: Backend) -> dict[str, Any]:
    """Who the plugin says it is, for the head of a JSON report."""
    report = backend.capabilities()
    return {
        "plugin_version": info.plugin_version,
        "contract_version": info.contract_version,
        "runtime_version": info.runtime_version,
        "collective_library_version": info.collective_library_version,
        "framework_version": info.framework_version,
        "chip": report.chip,
        "emulated": report.emulated,
        "emulation_note": report.emulation_note,
    }


def usage_error(error: MeshError) -> dict[str, Any] | None:
    """For a spawned process: the message that the command line is at fault; None where the plugin is."""
    usage = error_of_a_flag(error)
    if usage is None:
        return None
    return {"usage": {"message": usage.message, "reason": usage.reason, "field": usage.field}}


def error_of_a_flag(error: MeshError) -> InvalidArgument | None:
    """An error of a back end's start as one of the flag that caused it; None where it is not about a flag."""
    flag, message = _flag_at_fault(error), error.message
    if flag is None:
        return None
    if flag == _EMULATE_FLAG:
        message = f"{flag}: {message}"  # the plugin knows of its option only
    return InvalidArgument(message, field=flag, reason=error.reason, **error.metadata)


def _flag_at_fault(error: MeshError) -> str | None:
    if isinstance(error, UnknownBackend):
        return "--backend"
    field = error.field or ""
    if not field.startswith(_OPTIONS):
        return None
    # The flag stands for this option; a plugin without an emulator refuses it as one that it does not know.
    return _EMULATE_FLAG if field == _OPTIONS + EMULATE else "--option"


def raise_usage_error(message: Mapping[str, Any]) -> None:
    """For its parent: raises InvalidArgument where `message` is one of `usage_error`."""
    usage = message.get("usage")
    if usage is not None:
        raise InvalidArgument(usage["message"], field=usage["field"], reason=usage["reason"])


def describe_search(name: str) -> str:
    """What was looked for, and what is installed. Imports no plugin."""
    installed = list_backends()
    origin = next((each.origin for each in installed if each.name == name), "nothing")
    others = ", ".join(f"{each.name} ({each.origin})" for each in installed)
    return f"Looked for {name!r} among the entry points {ENTRY_POINT_GROUP}: {origin}; installed: {others}"
