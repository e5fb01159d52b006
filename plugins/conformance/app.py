"""Behind `chipmesh conformance`: runs the kit and shows its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_json
from meshkit.errors import InvalidArgument
from plugins.conformance.kit import run_conformance
from plugins.conformance.report import Report, print_table, write_junit


def main(
    *, backend: str, options: Sequence[str], only: str, quick: bool, as_json: bool, junit: Path | None
) -> int:
    """Run, print, and return the exit code: 0, or 1 where any check failed.

    Raises:
        InvalidArgument: (--backend, --option) no such back end, or an option that it does not take.
        MeshError: the back end does not start.
    """
    settings = _read_options(options)
    try:
        report = run_conformance(backend, settings, only=only, quick=quick)
    except InvalidArgument as error:
        raise _about_a_flag(error) from error
    if not report.results:
        raise InvalidArgument(f"-k {only!r} leaves no check; leave it out to see their names", field="--only")
    if junit is not None:
        _write(report, junit)
    if as_json:
        print_json(report.to_json())
    else:
        print_table(report, Console(highlight=False))
    return EXIT_FAILED if report.failures else EXIT_OK


def _read_options(words: Sequence[str]) -> Mapping[str, str]:
    pairs = [word.partition("=") for word in words]
    for word, (key, equals, _) in zip(words, pairs, strict=True):
        if not key or not equals:
            raise InvalidArgument(f"--option: {word!r} has not the form KEY=VALUE", field="--option")
    return {key: value for key, _, value in pairs}


def _about_a_flag(error: InvalidArgument) -> InvalidArgument:
    """The same error with the flag at fault: a wrong command line has an exit code of its own."""
    flag = "--option" if (error.field or "").startswith("backend_options.") else "--backend"
    return InvalidArgument(error.message, field=flag, reason=error.reason, **error.metadata)


def _write(report: Report, path: Path) -> None:
    try:
        write_junit(report, path)
    except OSError as error:
        raise InvalidArgument(f"--junit: {path} cannot be written: {error}", field="--junit") from error
