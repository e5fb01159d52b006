"""Stand-in for `xspeedgate_ops`: of it only its place in the order is used, none of its operators."""

from __future__ import annotations

import sys

__version__ = "1.3.0+emulated"

if "plugins.kunlun_emulator.cocopod" not in sys.modules:
    raise ImportError("undefined symbol: import cocopod before xspeedgate_ops", name=__name__)
