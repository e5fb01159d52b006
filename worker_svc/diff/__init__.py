"""`chipmesh diff`: one input through a model on two back ends; the first layer and operator that diverge."""

from __future__ import annotations
