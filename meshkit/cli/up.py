"""`up`: a mesh in the foreground, or detached; shown to a person or told as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from meshkit.cli.backend_options import read_backend_options
from meshkit.cli.detach import run_detached
from meshkit.cli.display import LaunchDisplay, describe_mesh, print_summary
from meshkit.cli.events import LaunchEvent, print_event
from meshkit.cli.launch import run_mesh
from meshkit.cli.options import GroupOptions, MeshOptions
from meshkit.cli.state import MeshRecord, StateDir, state_dir_from_environment
from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, describe_error, print_json
from meshkit.cli.tools import plugin_options
from meshkit.config import FrozenConfig, load_config, parse_config
from meshkit.errors import InvalidArgument, MeshError
from meshkit.modelstore import default_cache_dir


class _GroupsFile(FrozenConfig):
    groups: tuple[GroupOptions, ...] = Field(min_length=1)


OUTPUT_FLAGS = ("detach", "as_json")


def read_options(flags: Mapping[str, Any]) -> MeshOptions:
    """The flags of the command line, by typer's names, as options.

    Raises:
        InvalidArgument: a value that no mesh can have.
    """
    values = {name: value for name, value in flags.items() if name not in OUTPUT_FLAGS}
    words = plugin_options(values.pop("backend_option"), emulate=values.pop("emulate"))
    values["backend_options"] = read_backend_options(words, flag="--backend-option")
    values["groups"] = read_groups(values.pop("groups_file"))
    values["start_timeout_s"] = values.pop("start_timeout")
    values["tensor_parallel_size"] = values.pop("tp_size")
    values["pipeline_parallel_size"] = values.pop("pp_size")
    return parse_config(MeshOptions, {**values, "cache_dir": default_cache_dir()}, source="chipmesh up")


def read_groups(file: Path | None) -> tuple[GroupOptions, ...]:
    """The groups of `{"groups": [{"name": ..., "devices": ...}, ...]}`.

    Raises:
        InvalidArgument: (--groups-file) it cannot be read, or the place in it that is wrong.
    """
    if file is None:
        return ()
    try:
        groups = load_config(_GroupsFile, file).groups
    except InvalidArgument as error:
        raise InvalidArgument(f"--groups-file: {error.message}", field="--groups-file") from error
    twice = sorted({group.name for group in groups if sum(group.name == each.name for each in groups) > 1})
    if twice:
        raise InvalidArgument(
            f"--groups-file: group names must be unique; given twice: {', '.join(twice)}",
            field="--groups-file",
        )
    return groups


def start_mesh(options: MeshOptions, *, detach: bool, as_json: bool) -> None:
    """Detached: returns when the mesh is up. Else: returns when it was stopped.

    Raises:
        MeshError: it did not come up; nothing is left running.
    """
    state = state_dir_from_environment()
    state.prepare()
    with LaunchDisplay() as display:
        if detach:
            mesh = run_detached(options, state=state, report=display.report)
            display.close()
            _tell(mesh, state, detached=True, as_json=as_json)
            return

        def report(event: LaunchEvent) -> None:
            display.report(event)
            if event.kind == "up" and event.mesh is not None:
                display.close()
                _tell(event.mesh, state, detached=False, as_json=as_json)

        run_mesh(options, state=state, report=report)


def _tell(mesh: MeshRecord, state: StateDir, *, detached: bool, as_json: bool) -> None:
    if as_json:
        print_json(describe_mesh(mesh, state))
    else:
        print_summary(mesh, state, detached=detached)


def launch_detached(options_file: Path) -> int:
    """The launcher's own process: its events go to stdout, its error too, as the last one."""
    state = state_dir_from_environment()
    try:
        state.prepare()
        run_mesh(load_config(MeshOptions, options_file), state=state, report=print_event)
    except MeshError as error:
        print_event(LaunchEvent(kind="failed", error=describe_error(error)))
        return EXIT_FAILED
    return EXIT_OK
