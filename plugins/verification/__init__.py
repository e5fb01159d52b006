"""Tools that look at a plugin before any model: `chipmesh verify` and `chipmesh collectives`."""

from __future__ import annotations
