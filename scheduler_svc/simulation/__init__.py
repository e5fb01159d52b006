"""The real scheduler core on modelled chips with a virtual clock: `chipmesh simulate`."""

from __future__ import annotations
