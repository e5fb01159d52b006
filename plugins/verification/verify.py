"""Behind `chipmesh verify`: the minimal check of a plugin before any model, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_json
from meshkit.errors import MeshError
from plugins.sdk.backend import Backend, PluginInfo
from plugins.sdk.registry import check_versions, read_info, start_backend, version_matrix
from plugins.verification.device_checks import DEVICE_CHECKS
from plugins.verification.outcome import CheckFailed, run_check
from plugins.verification.report import Check, Report, Status
from plugins.verification.request import (
    BackendChoice,
    describe_search,
    identity_of,
    raise_usage_error,
    usage_error,
)
from plugins.verification.spawned import Channel, ProcessDied, ProcessSilent, Spawned

CHECKS = ("load", "versions", *DEVICE_CHECKS)
"""All checks, in the order in which they are run."""


def main(*, backend: str, options: Mapping[str, str], timeout_s: float, as_json: bool) -> int:
    """Run, print, and return the exit code: 0, or 1 where any check failed.

    Raises:
        InvalidArgument: (--backend, --option) no such back end, or an option that it does not take.
    """
    report = verify(BackendChoice(backend, options), timeout_s=timeout_s)
    if as_json:
        print_json(report.to_json())
    else:
        report.print_table(Console(highlight=False))
    return EXIT_FAILED if report.failed else EXIT_OK


def verify(choice: BackendChoice, *, timeout_s: float) -> Report:
    """Check a back end in a spawned process; each check may take `timeout_s` seconds, then it has failed.

    Raises:
        InvalidArgument: as `main`.
    """
    done: list[Check] = []
    identity: dict[str, Any] = {}
    start = time.monotonic()
    with Spawned(check_in_child, choice) as child:
        while len(done) < len(CHECKS):
            try:
                message = child.receive(timeout_s)
            except (ProcessSilent, ProcessDied) as end:
                done.append(_cut_short(CHECKS[len(done)], choice, end, time.monotonic() - start))
                break
            raise_usage_error(message)
            identity.update(message.get("identity", {}))
            if "check" in message:
                done.append(Check.from_json(message["check"]))
                start = time.monotonic()
            if "end" in message:
                break
    return Report("verification", choice.name, (*done, *_not_run(done)), identity)


def _cut_short(name: str, choice: BackendChoice, end: Exception, duration_s: float) -> Check:
    how = "hangs: " if isinstance(end, ProcessSilent) else ""
    return Check(name, Status.FAIL, f"backend {choice.name!r} in {name}: {how}{end}", duration_s)


def _not_run(done: Sequence[Check]) -> list[Check]:
    last = done[-1].name if done else CHECKS[0]
    return [Check(name, Status.SKIP, f"not run, since {last} failed") for name in CHECKS[len(done) :]]


def check_in_child(channel: Channel, choice: BackendChoice) -> None:
    """All checks, told one by one; ends early where there is no back end to check."""
    start = time.monotonic()
    try:
        backend = start_backend(choice.name, choice.options)
    except MeshError as error:
        channel.send(usage_error(error) or _report(_failed_load(choice, error, start)))
        channel.send({"end": True})
        return
    started = f"{type(backend).__module__} started"
    channel.send(_report(Check("load", Status.PASS, started, time.monotonic() - start)))
    versions = run_check("versions", partial(_versions, choice.name, backend, channel))
    channel.send(_report(versions))
    if versions.status is Status.FAIL:
        channel.send({"end": True})
        return
    for check in check_devices(backend):
        channel.send(_report(check))


def check_devices(backend: Backend) -> Iterator[Check]:
    """The checks of a started back end, one by one, each under the settings of its chip."""
    for name, check in DEVICE_CHECKS.items():
        yield run_check(name, partial(backend.execute_runnable, partial(check, backend)))


def _report(check: Check) -> dict[str, Any]:
    return {"check": check.to_json()}


def _failed_load(choice: BackendChoice, error: MeshError, start: float) -> Check:
    detail = f"{error.message}. {describe_search(choice.name)}"
    return Check("load", Status.FAIL, detail, time.monotonic() - start)


def _versions(name: str, backend: Backend, channel: Channel) -> str:
    """The version matrix; who the plugin is goes to the channel at once."""
    info = read_info(name, backend)
    channel.send({"identity": identity_of(info, backend)})
    try:
        check_versions(info)
    except MeshError as error:
        raise CheckFailed(error.message) from error
    return _describe_matrix(info)


def _describe_matrix(info: PluginInfo) -> str:
    rows = [row for row in version_matrix(info) if row.version or row.allowed]
    parts = [f"{row.part} {row.version} (built for {row.allowed or 'any'})" for row in rows]
    return f"plugin {info.plugin_version}; {', '.join(parts)}"
