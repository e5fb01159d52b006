"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with a stage ("downloading", "unpacking", "reading", "tokenizer") and its share done, 0.0 to 1.0."""


def ignore_progress(stage: str, share: float) -> None:
    """For callers that do not want to know."""
    del stage, share
