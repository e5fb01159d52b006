"""Making and showing the certificates of a mesh. Services only read them, see meshkit.rpc.tls."""

from __future__ import annotations
