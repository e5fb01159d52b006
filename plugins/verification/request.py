"""What the tools of this package share: which back end, who it is, and errors of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.errors import InvalidArgument, MeshError
from plugins.sdk.backend import Backend, PluginInfo
from plugins.sdk.registry import ENTRY_POINT_GROUP, UnknownBackend, list_backends


@dataclass(frozen=True)
class BackendChoice:
    """A back end by name, with the options that its factory gets."""

    name: str
    options: Mapping[str, str]


def read_choice(backend: str, options: Sequence[str]) -> BackendChoice:
    """Raises InvalidArgument (--option) for a word that is not KEY=VALUE."""
    pairs = [word.partition("=") for word in options]
    for word, (key, equals, _) in zip(options, pairs, strict=True):
        if not key or not equals:
            raise InvalidArgument(f"--option: {word!r} has not the form KEY=VALUE", field="--option")
    return BackendChoice(backend, {key: value for key, _, value in pairs})


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
    field = error.field or ""
    if not isinstance(error, UnknownBackend) and not field.startswith("backend_options."):
        return None
    flag = "--backend" if isinstance(error, UnknownBackend) else "--option"
    return {"usage": {"message": error.message, "reason": error.reason, "field": flag}}


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
