"""`down`: stops the mesh of this state folder."""

from __future__ import annotations

from meshkit.cli.display import LaunchDisplay
from meshkit.cli.state import state_dir_from_environment
from meshkit.cli.stopping import stop_mesh
from meshkit.cli.terminal import print_json


def stop(*, as_json: bool) -> None:
    """Stops what runs and says so; a second call finds nothing and is fine."""
    state = state_dir_from_environment()
    with LaunchDisplay() as display:
        stopped = stop_mesh(state, report=display.report)
    if as_json:
        print_json({"stopped": stopped, "state_dir": str(state.root)})
    elif not stopped:
        print(f"no mesh is up with state in {state.root}")
