"""The framework's reference: operators and sampling in plain torch, the oracle and the fallback of every
chip.
"""

from __future__ import annotations
