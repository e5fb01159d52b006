"""`chipmesh doctor`: looks at a running mesh, says what is wrong with it and how to mend it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from meshkit.cli.doctor.catalogue import run_checks
from meshkit.cli.doctor.finding import Status
from meshkit.cli.doctor.gather import Surroundings, gather_facts
from meshkit.cli.doctor.proc import Proc
from meshkit.cli.doctor.report import describe, print_results, worst
from meshkit.cli.doctor.targets import find_targets
from meshkit.cli.scheduler_channel import TLS_VARIABLE
from meshkit.cli.state import state_dir_from_environment
from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_json
from meshkit.errors import InvalidArgument


def run_doctor(
    *,
    endpoint: str | None = None,
    gateway: str | None = None,
    tls: Path | None = None,
    configs: Sequence[Path] = (),
    as_json: bool = False,
    root: Path = Path("/"),
    sysfs: Path = Path("/sys"),
) -> int:
    """Prints all checks of the mesh of `up`, or of the one named; the exit code is 1 where one found a fault.

    endpoint, gateway: addresses of a scheduler and of a gateway. configs: files (or folders) of services.
    tls: folder of `chipmesh certs create`, or an operator's own; None: what CHIPMESH_TLS names.
    root, sysfs: other trees than the host's own.

    Raises:
        FailedPrecondition: no mesh is known, or its services ask for a certificate and none is there.
        InvalidArgument: `tls` is no folder.
    """
    began = time.monotonic()
    if tls is None and (named := os.environ.get(TLS_VARIABLE)):
        tls = Path(named)
    if tls is not None and not tls.is_dir():
        raise InvalidArgument(
            f"--tls {tls} is no folder; make one with `chipmesh certs create DIR ...`", field="--tls"
        )
    state, proc = state_dir_from_environment(), Proc(root)
    targets = find_targets(state=state, proc=proc, endpoint=endpoint, gateway=gateway, configs=configs)
    around = Surroundings(proc=proc, sysfs=sysfs, state=state.root)
    facts = asyncio.run(gather_facts(targets, around=around, tls=tls))
    results = run_checks(facts)
    duration_s = time.monotonic() - began
    if as_json:
        print_json(describe(results, facts, duration_s=duration_s))
    else:
        print_results(results, duration_s=duration_s)
    return EXIT_FAILED if worst(results) is Status.FAULT else EXIT_OK
