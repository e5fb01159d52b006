"""Who answers at each address of a service, and whether it is the one that should."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshkit.address import UnixAddress, parse_listen
from meshkit.cli.doctor.connections import TIMEOUT_S
from meshkit.cli.doctor.facts import ExecutorFacts, PortFacts, PortRole, ServiceFacts, Target
from meshkit.cli.doctor.proc import Proc


def addresses_of(target: Target) -> Iterator[tuple[PortRole, str, int | None]]:
    """(role, address, pid that should listen there) of each address that is known."""
    if target.address is not None:
        yield "grpc", target.address, target.pid
    if target.http_address is not None:
        yield "http", target.http_address, target.pid
    if target.openai_address is not None:
        yield "openai", target.openai_address, target.pid
    if target.executor_address is not None:
        yield "executor", target.executor_address, target.executor_pid


async def probe_ports(targets: Iterable[Target], *, proc: Proc) -> tuple[PortFacts, ...]:
    """Connects to every address, all at once."""
    wanted = [(target, *each) for target in targets for each in addresses_of(target)]
    errors = await asyncio.gather(*(_connect(address) for _, _, address, _ in wanted))
    return tuple(
        PortFacts(
            service=target.executor_name if role == "executor" else target.name,
            role=role,
            address=address,
            error=error,
            owner=proc.owner_of(address),
            expected_pid=pid,
        )
        for (target, role, address, pid), error in zip(wanted, errors, strict=True)
    )


def with_pids(targets: Iterable[Target], ports: Iterable[PortFacts]) -> tuple[Target, ...]:
    """Where no ready file tells a service's process, it is the one of ours that listens at its address."""
    owners = {
        port.service: port.owner.pid
        for port in ports
        if port.role != "executor" and port.owner is not None and port.owner.is_ours
    }
    return tuple(
        replace(target, pid=owners.get(target.name)) if target.pid is None else target for target in targets
    )


def does_speak(
    port: PortFacts, services: Iterable[ServiceFacts], executors: Iterable[ExecutorFacts]
) -> bool | None:
    """Whether what answers at a port speaks as it should; None: nothing was heard."""
    if port.role == "openai":
        return None  # Asked nothing, as it may want a key: who holds the port tells enough.
    if port.role == "executor":
        errors = [each.error for each in executors if each.target.executor_name == port.service]
        return _speaks_grpc(errors[0]) if errors else None
    for each in services:
        if each.target.name == port.service:
            if port.role == "http":
                return None if each.http_serving is None else each.http_error is None
            return _speaks_grpc(each.grpc_error)
    return None


def _speaks_grpc(error: str | None) -> bool | None:
    if error is None:
        return True
    # What is no gRPC server ends the connection, or says nothing that its client understands.
    if "UNIMPLEMENTED" in error:
        return False
    return None if "DEADLINE" in error else "UNAVAILABLE" not in error


async def _connect(address: str) -> str | None:
    """None where somebody takes the connection, else why not."""
    listen = parse_listen(address)
    try:
        opening = (
            asyncio.open_unix_connection(listen.path)
            if isinstance(listen, UnixAddress)
            else asyncio.open_connection(listen.host, listen.port)
        )
        _, writer = await asyncio.wait_for(opening, TIMEOUT_S)
    except asyncio.TimeoutError:
        return f"nobody took the connection within {TIMEOUT_S:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    writer.close()
    return None
