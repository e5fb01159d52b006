"""Collectives: this chip works alone."""

from __future__ import annotations

from plugins.sdk.collectives import Collectives


def open_collectives() -> Collectives | None:
    """None: no group can be joined, and the report lists no primitive.

    REPLACE: return a subclass of plugins.sdk.process_group.ProcessGroupCollectives over your library: its
    docstring is the guide, plugins/cpu/collectives.py an example. Then give PRIMITIVES of that module to
    `collectives` in the report (plugin.py).
    """
    return None
