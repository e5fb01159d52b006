"""`python -m chaos.faulty_service scheduler --config FILE --faults FOLDER`: its messages can be lost.

It is the service as it is: only the functions that it opens channels and servers by are others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import meshkit.rpc.channel
import meshkit.rpc.server
from chaos.faulty_rpc import FaultyChannel, FaultyServices, UnaryFaults
from chaos.message_faults import FaultDesk
from meshkit.cli.services import run_named_service


def put_in_the_way(desk: FaultDesk) -> None:
    """From now on channels and servers have faults. Before any service's module is imported: those take the
    functions by name.
    """
    open_channel, server = meshkit.rpc.channel.open_channel, meshkit.rpc.server.RpcServer
    calls = UnaryFaults(desk)

    def open_faulty_channel(target: str, **options: Any) -> Any:
        return FaultyChannel(open_channel(target, **options), target, desk, calls)

    class FaultyServer(server):  # type: ignore[misc, valid-type]  # a class that is known at run time only
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "interceptors": [FaultyServices(desk)]})

    meshkit.rpc.channel.open_channel = open_faulty_channel
    meshkit.rpc.server.RpcServer = FaultyServer  # type: ignore[misc]  # that is what this module is for


def main() -> int:
    """Run the service to its end; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.faulty_service")
    parser.add_argument("service")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--faults", required=True, type=Path)
    arguments = parser.parse_args()
    put_in_the_way(FaultDesk(arguments.faults))
    return run_named_service(arguments.service, arguments.config)


if __name__ == "__main__":
    sys.exit(main())
