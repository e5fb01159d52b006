"""gRPC services of the scheduler: translation only."""

from __future__ import annotations
