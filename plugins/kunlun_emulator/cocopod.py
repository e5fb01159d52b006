"""Stand-in for `cocopod`, whose libraries the two operator packages link against."""

from __future__ import annotations

__version__ = "1.3.0+emulated"
