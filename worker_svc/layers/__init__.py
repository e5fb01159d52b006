"""Parts that models are made of: weights packed for a chip's operators, rotary tables, paged attention."""

from __future__ import annotations
