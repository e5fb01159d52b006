"""What `up` says of the mesh that it started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.display import describe_mesh, print_summary
from meshkit.cli.processes import ProcessRecord
from meshkit.cli.state import MeshRecord, ServiceRecord, StateDir


def mesh(**gateway: Any) -> MeshRecord:
    process = ProcessRecord(pid=1, start_ticks=1)
    services = tuple(
        ServiceRecord(
            name=kind, kind=kind, process=process, address="127.0.0.1:1", http_address="127.0.0.1:2",
            log=Path("/logs") / kind, details=gateway if kind == "gateway" else {},
        )
        for kind in ("scheduler", "worker", "gateway")
    )  # fmt: skip
    return MeshRecord(phase="ready", launcher=process, model="m", services=services)


@pytest.mark.parametrize(
    ("details", "page"),
    [
        ({"openai_address": "127.0.0.1:3", "page": True}, "http://127.0.0.1:3/"),
        ({"openai_address": "0.0.0.0:3", "page": True}, "http://127.0.0.1:3/"),
        ({"openai_address": "127.0.0.1:3"}, None),
        ({}, None),
    ],
)
def test_the_pages_address_is_told_to_people_and_programs(
    details: dict[str, Any], page: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, state = mesh(**details), StateDir(tmp_path)
    assert describe_mesh(record, state)["page"] == page
    print_summary(record, state, detached=False)
    assert (f"page: {page}" in capsys.readouterr().out) is (page is not None)
