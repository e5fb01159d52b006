"""The hash back end: an exact oracle for the whole mesh.

Its tokens are SHA-256 digests kept in the KV pages.
"""

from __future__ import annotations

from plugins.hash.plugin import backend

__all__ = ["backend"]
