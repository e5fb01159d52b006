"""Behind `chipmesh conformance`: runs the kit and shows its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_error, print_json
from meshkit.errors import InvalidArgument
from plugins.conformance.kit import Limits, run_conformance, run_conformance_at
from plugins.conformance.report import Report, print_table, write_junit
from plugins.verification.request import error_of_a_flag


def main(
    *,
    backend: str,
    address: str,
    options: Mapping[str, str],
    only: str,
    quick: bool,
    timeout_s: float,
    as_json: bool,
    junit: Path | None,
) -> int:
    """Run, print, and return the exit code: 0, or 1 where any check failed. A check that hangs ends the
    process with 1 once the report is written.

    backend, address: exactly one is set, "" for the other.

    Raises:
        InvalidArgument: (--backend, --address, --option, --emulate, --only, --junit) the command line is
            wrong: no such back end, an option that it does not take, a file that cannot be written.
        MeshError: the back end does not start, or no executor answers at the address.
    """
    output = _Output(as_json, junit)
    limits = Limits(timeout_s, output.write_and_exit)
    if _is_by_address(backend, address, options):
        report = _run_at(address, only=only, quick=quick, limits=limits)
    else:
        report = _run(backend, options, only=only, quick=quick, limits=limits)
    if not report.results:
        raise InvalidArgument(f"-k {only!r} leaves no check; leave it out to see their names", field="--only")
    output.write(report)
    return EXIT_FAILED if report.failures else EXIT_OK


@dataclass(frozen=True)
class _Output:
    """Where the report goes."""

    as_json: bool
    junit: Path | None

    def write(self, report: Report) -> None:
        """Raises InvalidArgument (--junit) where the file cannot be written."""
        self._write_file(report)
        self._show(report)

    def write_and_exit(self, report: Report) -> None:
        """For a check that hangs: its call cannot be ended, so the process is, whatever happens here."""
        try:
            self._show(report)
            self._write_file(report)
        except InvalidArgument as error:
            print_error(error, as_json=False)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    def _show(self, report: Report) -> None:
        if self.as_json:
            print_json(report.to_json())
        else:
            print_table(report, Console(highlight=False))

    def _write_file(self, report: Report) -> None:
        if self.junit is None:
            return
        try:
            write_junit(report, self.junit)
        except OSError as error:
            message = f"--junit: {self.junit} cannot be written: {error}"
            raise InvalidArgument(message, field="--junit") from error


def _is_by_address(backend: str, address: str, options: Mapping[str, str]) -> bool:
    if bool(backend) == bool(address):
        found = "both were" if backend else "neither was"
        raise InvalidArgument(
            f"{found} given: --backend NAME starts a plugin here, "
            "--address HOST:PORT asks an executor that runs",
            field="--address",
        )
    if address and options:
        name = next(iter(options))
        raise InvalidArgument(
            f"--option {name}: the executor at {address} was given its options when it started",
            field="--option",
        )
    return bool(address)


def _run(backend: str, options: Mapping[str, str], *, only: str, quick: bool, limits: Limits) -> Report:
    try:
        return run_conformance(backend, options, only=only, quick=quick, limits=limits)
    except InvalidArgument as error:
        raise (error_of_a_flag(error) or error) from error


def _run_at(address: str, *, only: str, quick: bool, limits: Limits) -> Report:
    try:
        return run_conformance_at(address, only=only, quick=quick, limits=limits)
    except InvalidArgument as error:
        if error.field != "address":
            raise
        raise InvalidArgument(f"--address: {error.message}", field="--address") from error
