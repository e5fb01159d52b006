"""The two back ends of a comparison: started, and the precision and page size that both can have. No torch
before the plugins: a vendor's runtime may want to come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshkit.errors import FailedPrecondition, InvalidArgument
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.planning import DEFAULT_PAGE_SIZE
from plugins.sdk.registry import UnknownBackend, load_backend

REFERENCE = "reference"
"""The built-in side: the framework's reference operators in float32 on the host."""
_REFERENCE_DTYPE = "float32"
_OPTIONS = "backend_options."


@dataclass(frozen=True)
class SideRequest:
    """One side of the command line. flag: "left" or "right"."""

    flag: str
    name: str
    options: Mapping[str, str]

    @property
    def is_reference(self) -> bool:
        """Whether it is the built-in side."""
        return self.name == REFERENCE


@dataclass(frozen=True)
class OpenSide:
    """A back end that runs. flag: "left" or "right"."""

    flag: str
    name: str
    backend: Backend

    @property
    def is_reference(self) -> bool:
        """Whether it is the built-in side."""
        return self.name == REFERENCE

    @property
    def report(self) -> CapabilityReport:
        """What it can do."""
        return self.backend.capabilities()


def open_side(request: SideRequest) -> OpenSide:
    """Start one side.

    Raises:
        InvalidArgument: (--left, --right, --left-option, --right-option) no such back end, one with a runner
            of its own, or an option that it does not take.
        MeshError: it does not start.
    """
    backend = _open_reference(request) if request.is_reference else _open_plugin(request)
    if backend.create_runner(RunnerContext()) is not None or backend.operators is None:
        raise InvalidArgument(
            f"backend {request.name!r} brings a runner of its own: it has no operators to compare",
            field=f"--{request.flag}",
        )
    return OpenSide(request.flag, request.name, backend)


def choose_dtypes(left: OpenSide, right: OpenSide, asked: str) -> tuple[str, str]:
    """Compute dtypes of the two sides: the one asked for, else the first that both plugins have; float32 for
    the built-in side.

    Raises:
        FailedPrecondition: (--dtype) auto, and they have none in common.
    """
    plugins = [side for side in (left, right) if not side.is_reference]
    dtype = _REFERENCE_DTYPE
    if plugins and asked in ("", "auto"):
        offers = [side.report.compute_dtypes for side in plugins]
        common = [each for each in offers[0] if all(each in offer for offer in offers)]
        if not common:
            raise FailedPrecondition(
                f"the two sides compute in no dtype in common: {left.name} in "
                f"{', '.join(left.report.compute_dtypes)}; {right.name} in "
                f"{', '.join(right.report.compute_dtypes)}",
                field="--dtype",
            )
        dtype = common[0]
    elif plugins:
        dtype = asked
    chosen = [_REFERENCE_DTYPE if side.is_reference else dtype for side in (left, right)]
    return chosen[0], chosen[1]


def choose_page_size(left: OpenSide, right: OpenSide) -> int:
    """Tokens of a KV page that both sides take: the first of the left's sizes that the right has too.

    Raises:
        FailedPrecondition: there is none.
    """
    sizes: list[Sequence[int]] = [side.report.page_sizes_tokens for side in (left, right)]
    if not sizes[0] or not sizes[1]:
        return (*sizes[0], *sizes[1], DEFAULT_PAGE_SIZE)[0]
    common = [size for size in sizes[0] if size in sizes[1]]
    if not common:
        raise FailedPrecondition(
            f"the two sides have no page size in common: {left.name} takes {list(sizes[0])}, {right.name} "
            f"{list(sizes[1])}"
        )
    return common[0]


def _open_reference(request: SideRequest) -> Backend:
    if request.options:
        name = next(iter(request.options))
        raise InvalidArgument(
            f"--{request.flag}-option {name}: the side {REFERENCE!r} takes no options",
            field=f"--{request.flag}-option",
        )
    # Only here, since it imports the tensor framework.
    from worker_svc.diff.reference_backend import ReferenceBackend  # noqa: PLC0415

    return ReferenceBackend()


def _open_plugin(request: SideRequest) -> Backend:
    try:
        return load_backend(request.name, request.options)
    except UnknownBackend as error:
        message = f"{error.message}. Beside them there is {REFERENCE!r}, built in"
        raise InvalidArgument(message, field=f"--{request.flag}", reason=error.reason) from error
    except InvalidArgument as error:
        if not (error.field or "").startswith(_OPTIONS):
            raise
        raise InvalidArgument(
            error.message, field=f"--{request.flag}-option", reason=error.reason, **error.metadata
        ) from error
