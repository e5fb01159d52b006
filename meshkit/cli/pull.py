"""`pull`: fetches a named model into the cache, with progress."""

from __future__ import annotations

from pathlib import Path

from meshkit.cli.display import LaunchDisplay
from meshkit.cli.events import LaunchEvent
from meshkit.cli.terminal import own_command, print_json
from meshkit.modelstore import default_cache_dir, pull_model


def pull(name: str, *, cache_dir: Path | None = None, as_json: bool) -> None:
    """Prints the model's folder.

    Raises:
        MeshError: as `pull_model`.
    """
    with LaunchDisplay() as display:
        folder = pull_model(
            name,
            cache_dir=cache_dir or default_cache_dir(),
            progress=lambda stage, share: display.report(
                LaunchEvent(kind="progress", service=name, stage=stage, fraction=share)
            ),
        )
    if as_json:
        print_json({"name": name, "path": str(folder)})
    else:
        print(f"{name} is at {folder}\nstart it with: {own_command()} up --model-path {name}")
