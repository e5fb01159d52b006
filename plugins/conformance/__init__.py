"""The conformance kit: shows whether a plugin does what it declares. `run_conformance` in kit.py is its
door.
"""

from __future__ import annotations
