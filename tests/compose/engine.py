"""The mesh on a container engine, seen from outside: docker and docker-compose as a user types them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVICES = ("gateway", "scheduler", "worker-a", "worker-b")
EMULATED = "compose.kunlun-emulated.yaml"
GATEWAY_ADDRESS = "127.0.0.1:50051"
PROJECT = "chipmesh"
POLL_S = 0.3


def run(*command: str, cwd: Path | None = None, timeout_s: float = 120.0) -> str:
    """A command's stdout; AssertionError with what it said where it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def docker(*arguments: str) -> str:
    """`docker ARGUMENTS`."""
    return run("docker", *arguments)


def wait_until(is_so: Callable[[], bool], *, what: Callable[[], object], timeout_s: float) -> float:
    """Look again and again; seconds until it was so. AssertionError with `what()` after `timeout_s`."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_s, f"not so after {timeout_s:g} s: {what()}"
        time.sleep(POLL_S)
    return time.monotonic() - began


@dataclass(frozen=True)
class ComposeMesh:
    """folder: with compose.yaml in it."""

    folder: Path

    def compose(self, *arguments: str, overlays: Sequence[str] = ()) -> str:
        """`docker-compose -f compose.yaml [-f OVERLAY]... ARGUMENTS`."""
        files = [word for name in ("compose.yaml", *overlays) for word in ("-f", name)]
        return run("docker-compose", *files, *arguments, cwd=self.folder)

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container, running or not."""
        # As docker-compose labels it: asked a hundred times, that command's own start would be felt.
        labels = {"project": PROJECT, "service": service, "oneoff": "False"}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        container = docker("ps", "--all", "--quiet", *filters).strip()
        assert container, f"{service} has no container"
        (description,) = json.loads(docker("inspect", container))
        assert isinstance(description, dict)
        return description

    def identity(self, service: str) -> tuple[str, int, str]:
        """Container id, pid of its first process and when that started: all the same while it was left
        alone.
        """
        found = self.inspect(service)
        return found["Id"], found["State"]["Pid"], found["State"]["StartedAt"]

    def health(self, service: str) -> str:
        """`starting`, `healthy`, `unhealthy`, or the container's state where that is not running."""
        state = self.inspect(service)["State"]
        return str(state["Health"]["Status"] if state["Status"] == "running" else state["Status"])

    def wait_until_healthy(self, *services: str, timeout_s: float = 90.0) -> float:
        """Seconds until all of them are healthy."""
        names = services or SERVICES
        return wait_until(
            lambda: all(self.health(name) == "healthy" for name in names),
            what=lambda: {name: (self.health(name), self.last_words(name)) for name in names},
            timeout_s=timeout_s,
        )

    def last_words(self, service: str) -> str:
        """The end of a service's log."""
        return self.compose("logs", "--no-color", "--tail=15", service)

    def status(self) -> dict[str, Any]:
        """`chipmesh status`, asked beside the scheduler: it is not published."""
        scheduler = self.inspect("scheduler")["Id"]
        answer = docker("exec", scheduler, "chipmesh", "status", "--endpoint", "127.0.0.1:50061", "--json")
        document = json.loads(answer)
        assert isinstance(document, dict)
        return document

    def doctor(self) -> dict[str, Any]:
        """`chipmesh doctor --json`, beside the scheduler; it exits with 1 where it finds a fault."""
        command = [
            "docker", "exec", str(self.inspect("scheduler")["Id"]), "chipmesh", "doctor", "--json",
            "--gateway", "gateway:50051", "--config", "/etc/chipmesh",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        assert (document["status"] == "fault") == (done.returncode == 1)
        return document

    def replica(self, worker: str) -> dict[str, Any] | None:
        """What the scheduler says of a worker; None where it has none of that id."""
        replicas = [replica for group in self.status()["groups"] for replica in group["replicas"]]
        return next((replica for replica in replicas if replica["worker"] == worker), None)

    def is_serving(self, worker: str) -> bool:
        """Whether the scheduler has it ready."""
        replica = self.replica(worker)
        return replica is not None and replica["state"] == "ready"

    def wait_until_serving(self, *workers: str, timeout_s: float = 60.0) -> float:
        """Seconds until the scheduler has each of them ready."""
        return wait_until(lambda: all(map(self.is_serving, workers)), what=self.status, timeout_s=timeout_s)
