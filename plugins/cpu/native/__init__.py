"""The step kernel: C++ behind a C interface, built with the wheel or at the first start, loaded by ctypes."""

from __future__ import annotations
