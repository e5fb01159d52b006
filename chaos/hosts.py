"""Hosts on one switch: network namespaces, each with an address of its own, all gone when this process is.

The switch lies in the network namespace of this process, which must be none that others use:
`unshare --net` (as root) makes one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.processes import until
from meshkit.errors import FailedPrecondition

OURS = 254
"""Last number of the address of this process on a network."""
COMMAND_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Host:
    """address: its only one beside loopback. port: of the switch, where its cable ends. keeper: a process
    that waits for the end of its input; a namespace lasts as long as a process is in it.
    """

    name: str
    address: str
    port: str
    keeper: Process

    @property
    def enter(self) -> tuple[str, ...]:
        """Put before a command, it runs on this host, under the same process id."""
        return ("nsenter", f"--net=/proc/{self.keeper.pid}/ns/net")


class Network:
    """The hosts by name, after `open`. number: of this network, 0 to 255; each has addresses of its own."""

    def __init__(self, number: int = 0) -> None:
        self._hosts: dict[str, Host] = {}
        self._subnet = f"10.77.{number}"
        self._switch = f"switch{number}"
        self._ports = f"port{number}-"

    def __repr__(self) -> str:
        return f"<Network {', '.join(self._hosts)}>"

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    async def open(self, names: Sequence[str]) -> None:
        """Make the switch, and a host for each name.

        Raises:
            FailedPrecondition: this process shares its network namespace, or may not make others.
        """
        if is_shared():
            raise FailedPrecondition(
                "hosts are network namespaces on a switch in this process' own one; start it by "
                "`unshare --net` as root",
                reason="NETWORK_IS_SHARED",
            )
        await _run("ip", "link", "set", "lo", "up")
        await _run("ip", "link", "add", self._switch, "type", "bridge")
        await _run("ip", "address", "add", f"{self._subnet}.{OURS}/24", "dev", self._switch)
        await _run("ip", "link", "set", self._switch, "up")
        for number, name in enumerate(names, start=1):
            self._hosts[name] = await self._add_host(name, number)

    async def cut(self, name: str) -> None:
        """Pull a host's cable out: what it sends and what is sent to it is lost without a word."""
        await _run("ip", "link", "set", self._hosts[name].port, "nomaster")

    async def join(self, name: str) -> None:
        """Put it in again."""
        await _run("ip", "link", "set", self._hosts[name].port, "master", self._switch)

    async def close(self) -> None:
        """End the hosts; processes that still run on them keep their namespace alive."""
        for host in self._hosts.values():
            if host.keeper.stdin is not None:
                host.keeper.stdin.close()
            await host.keeper.wait()
        self._hosts.clear()
        await _run("ip", "link", "delete", self._switch)

    async def _add_host(self, name: str, number: int) -> Host:
        port, address = f"{self._ports}{number}", f"{self._subnet}.{number}"
        keeper = await asyncio.create_subprocess_exec(
            "unshare", "--net", "cat", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        host = Host(name, address, port, keeper)
        ours = os.readlink("/proc/self/ns/net")

        def has_its_own() -> bool:
            if keeper.returncode is not None:
                raise FailedPrecondition("`unshare --net` failed: may this process make network namespaces?")
            return os.readlink(f"/proc/{keeper.pid}/ns/net") != ours

        await until(has_its_own, timeout_s=COMMAND_TIMEOUT_S, what=f"{name} has a network", poll_s=0.01)
        await _run(
            "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid)
        )
        await _run("ip", "link", "set", port, "master", self._switch, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            await _run(*host.enter, "ip", *words)
        return host


def is_shared() -> bool:
    """Whether this process' network leads anywhere but to hosts of ours: a new namespace has no route."""
    routes = Path("/proc/self/net/route").read_text(encoding="ascii").splitlines()[1:]
    return any(not route.startswith("switch") for route in routes)


async def _run(*command: str) -> None:
    """Raises FailedPrecondition with what the command said."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    if process.returncode:
        raise FailedPrecondition(f"`{' '.join(command)}`: {output.decode(errors='replace').strip()}")
