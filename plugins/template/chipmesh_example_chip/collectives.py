"""Collectives: this chip works alone."""

from __future__ import annotations

from plugins.sdk.collectives import Collectives


def open_collectives() -> Collectives | None:
    """None: no group can be joined, and the report lists no primitive.

    REPLACE: return a plugins.sdk.collectives.Collectives over your library; plugins/cpu/collectives.py shows
    how a rank that never comes is named. Then list its primitives in the report (plugin.py).
    """
    return None
