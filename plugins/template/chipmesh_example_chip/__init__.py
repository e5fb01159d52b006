"""The plugin `example`: what the entry point in pyproject.toml names. Importing it costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugins.sdk.backend import Backend

__version__ = "0.1.0"


def backend(options: Mapping[str, str]) -> Backend:
    """Start the plugin.

    Raises:
        InvalidArgument: an unknown option.
    """
    # REPLACE: what must be set before your runtime loads (os.environ.setdefault) goes here, first.
    # Late imports: only the executor that was told to use this chip pays for torch and your runtime.
    from chipmesh_example_chip.options import check_options  # noqa: PLC0415
    from chipmesh_example_chip.plugin import ExampleBackend  # noqa: PLC0415

    check_options(options)
    return ExampleBackend()
