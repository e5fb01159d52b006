"""The fault harness: real processes, faults that are verified, an exact oracle for what clients got."""

from __future__ import annotations
