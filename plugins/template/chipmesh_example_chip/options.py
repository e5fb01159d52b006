"""Options of the plugin, as `chipmesh up --backend-option NAME=VALUE` carries them: none so far."""

from __future__ import annotations

from collections.abc import Mapping

from meshkit.errors import InvalidArgument


def check_options(options: Mapping[str, str]) -> None:
    """Raises InvalidArgument that names the first unknown option.

    REPLACE: once you have options, return them as a frozen dataclass and give that to your Backend.
    """
    for name in sorted(options):
        raise InvalidArgument(
            f"backend option {name!r} is unknown to the plugin 'example'; it takes none",
            field=f"backend_options.{name}",
        )
