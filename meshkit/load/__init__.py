"""Load on any server, measured from the client's side: `chipmesh bench serve`, and what benchmarks/ use.

Names are imported at their first use: the command line imports this package for its flags alone, and gRPC's
generated code and tracing would add 0.1 s to the start of each process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshkit.load.arrivals import spread_arrivals
    from meshkit.load.driver import Clock, run_closed_loop, run_open_loop
    from meshkit.load.figures import describe_samples
    from meshkit.load.grpc_target import GrpcTarget
    from meshkit.load.openai_target import OpenAiTarget
    from meshkit.load.request import ChatTurn, LoadRequest
    from meshkit.load.sample import Sample
    from meshkit.load.targets import Received, ServedModel, Target, Usage
    from meshkit.load.trace import read_trace
    from meshkit.load.workloads import multi_turn, random_tokens, shared_prefix, tree_of_thought

__all__ = [
    "ChatTurn",
    "Clock",
    "GrpcTarget",
    "LoadRequest",
    "OpenAiTarget",
    "Received",
    "Sample",
    "ServedModel",
    "Target",
    "Usage",
    "describe_samples",
    "multi_turn",
    "random_tokens",
    "read_trace",
    "run_closed_loop",
    "run_open_loop",
    "shared_prefix",
    "spread_arrivals",
    "tree_of_thought",
]

_NAMES_OF = {
    "arrivals": ("spread_arrivals",),
    "driver": ("Clock", "run_closed_loop", "run_open_loop"),
    "figures": ("describe_samples",),
    "grpc_target": ("GrpcTarget",),
    "openai_target": ("OpenAiTarget",),
    "request": ("ChatTurn", "LoadRequest"),
    "sample": ("Sample",),
    "targets": ("Received", "ServedModel", "Target", "Usage"),
    "trace": ("read_trace",),
    "workloads": ("multi_turn", "random_tokens", "shared_prefix", "tree_of_thought"),
}
_HOME_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
