"""Options of the `kunlun` plugin, as `backend_options` carries them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import InvalidArgument
from plugins.sdk.communication import OPTIONS, PLUGINS_CHOICE, CommunicationOptions, read_communication

_KNOWN = ("check_versions", "emulate", "visible_devices", *OPTIONS)
_WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class KunlunOptions:
    """emulate: run on the emulator of the vendor's runtime instead of a chip; never chosen by itself.

    visible_devices: physical ids such as "2,3", numbered from 0 by us; None: as the environment has it.
    check_versions: refuse vendor packages of versions that were never released together.
    communication: of the ranks of a set.
    """

    emulate: bool = False
    visible_devices: str | None = None
    check_versions: bool = True
    communication: CommunicationOptions = PLUGINS_CHOICE


def read_options(options: Mapping[str, str]) -> KunlunOptions:
    """Raises InvalidArgument that names the option at fault."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise InvalidArgument(
            f"backend option {unknown[0]!r} is unknown to the kunlun plugin; it takes: {', '.join(_KNOWN)}",
            field=f"backend_options.{unknown[0]}",
        )
    return KunlunOptions(
        emulate=_read_switch(options, "emulate", default=False),
        visible_devices=_read_devices(options.get("visible_devices")),
        check_versions=_read_switch(options, "check_versions", default=True),
        communication=read_communication(options),
    )


def _read_switch(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name)
    if text is None:
        return default
    value = _WORDS.get(text.lower())
    if value is None:
        raise InvalidArgument(
            f"backend option {name} is {text!r}; it has to be true or false", field=f"backend_options.{name}"
        )
    return value


def _read_devices(text: str | None) -> str | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise InvalidArgument(
            f"backend option visible_devices is {text!r}; it has to be ids without repetition such as 0,1",
            field="backend_options.visible_devices",
        )
    return ",".join(parts)
