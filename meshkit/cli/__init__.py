"""The `chipmesh` command: starts, stops, asks and shows a mesh, or runs one of its services."""

from __future__ import annotations

from meshkit.cli.app import main

__all__ = ["main"]
