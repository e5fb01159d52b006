"""Headers of everything that the page's part of the gateway answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Code and styles from this gateway's files only: what a model says can at most be shown."""

SECURITY_HEADERS: Mapping[str, str] = MappingProxyType({
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
})  # fmt: skip
