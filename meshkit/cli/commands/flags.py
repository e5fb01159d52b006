"""Flags that several commands have, each spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ConfigFile = Annotated[
    Path, typer.Option("--config", help="The service's configuration: a JSON file or a folder of them.")
]
Emulate = Annotated[
    bool, typer.Option("--emulate", help="Run on the plugin's emulator of its chip: its option emulate=true.")
]
PluginOptions = Annotated[
    list[str] | None, typer.Option("--option", help="KEY=VALUE for the plugin; may be repeated.")
]
OperatorTls = Annotated[
    Path | None,
    typer.Option("--tls", metavar="DIR", help="An operator's certificate. Default: CHIPMESH_TLS, or none."),
]
SchedulerEndpoint = Annotated[
    str | None, typer.Option("--endpoint", help="HOST:PORT of a scheduler. Default: of `up`'s mesh.")
]
