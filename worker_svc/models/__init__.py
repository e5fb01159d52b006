"""Model architectures, written on the operator catalogue: no chip, no kernel."""

from __future__ import annotations
