"""`chipmesh traffic`: how a model's requests are split among its groups, seen and changed while it runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.mesh_status import STATUS_TIMEOUT_S, fetch_mesh
from meshkit.cli.scheduler_channel import open_scheduler
from meshkit.cli.state import require_endpoint, state_dir_from_environment
from meshkit.cli.terminal import print_json
from meshkit.errors import InvalidArgument

_BAR_CELLS = 30


def show_traffic(*, endpoint: str | None, as_json: bool, tls: Path | None = None) -> None:
    """Print each group's weight and share. tls: as for `open_scheduler`.

    Raises:
        MeshError: no mesh is up, or its scheduler does not answer.
    """
    address = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    _print(describe_traffic(asyncio.run(fetch_mesh(address, tls=tls))), as_json=as_json)


def set_traffic(
    words: Sequence[str], *, model: str, endpoint: str | None, as_json: bool, tls: Path | None = None
) -> None:
    """Set the weights of a model's groups, those left out to 0, and print what holds then.

    Raises:
        InvalidArgument: (GROUP=WEIGHT) a word of another form, or what the scheduler refuses.
        MeshError: as `show_traffic`.
    """
    weights = read_weights(words)
    address = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    _print(describe_traffic(asyncio.run(_change(address, model, weights, tls))), as_json=as_json)


def set_shadow(
    *,
    source: str,
    shadow: str,
    share: float,
    endpoint: str | None,
    as_json: bool,
    tls: Path | None = None,
) -> None:
    """Mirror a share of a group's requests to another group, 0 to end it, and print what holds then.

    Raises:
        MeshError: as `set_traffic`.
    """
    address = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    request = admin_pb2.SetShadowRequest(source_group=source, shadow_group=shadow, share=share)
    _print(describe_traffic(asyncio.run(_mirror(address, request, tls))), as_json=as_json)


def read_weights(words: Sequence[str]) -> dict[str, float]:
    """Weights by group of words such as "gpu=80".

    Raises:
        InvalidArgument: a word of another form, a group twice, or a weight that is negative or no number.
    """
    weights: dict[str, float] = {}
    for word in words:
        name, equals, number = word.rpartition("=")
        if not name or not equals:
            raise _wrong(f"{word!r} has not the form GROUP=WEIGHT, for example gpu=80")
        if name in weights:
            raise _wrong(f"group {name!r} comes twice")
        try:
            weights[name] = float(number)
        except ValueError:
            raise _wrong(f"the weight of {name!r} is {number!r}, no number") from None
        if not math.isfinite(weights[name]) or weights[name] < 0:
            raise _wrong(f"the weight of {name!r} is {number}; weights are 0 or more")
    return weights


def describe_traffic(mesh: admin_pb2.Mesh) -> dict[str, Any]:
    """{"models": {MODEL: [{"group", "weight", "share", "ready"}]}}; share: of the weights of groups with a
    replica that is ready, since the others hand theirs on.
    """
    models: dict[str, list[dict[str, Any]]] = {}
    for group in mesh.groups:
        ready = sum(each.state == admin_pb2.ReplicaStatus.STATE_READY for each in group.replicas)
        line: dict[str, Any] = {"group": group.name, "weight": group.weight, "ready": ready}
        if group.rolled_back:
            line["rolled_back"] = group.rolled_back
        if group.HasField("shadow"):
            line["shadow"] = describe_shadow(group.shadow)
        models.setdefault(group.model, []).append(line)
    for lines in models.values():
        total = sum(line["weight"] for line in lines if line["ready"])
        for line in lines:
            line["share"] = round(line["weight"] / total, 4) if total and line["ready"] else 0.0
    return {"models": models}


def describe_shadow(shadow: admin_pb2.ShadowStatus) -> dict[str, Any]:
    """Counts of the copies, and `agreement`: the share of served tokens that the copies had too."""
    counts = {
        name: getattr(shadow, name)
        for name in ("share", "mirrored", "compared", "identical", "tokens", "equal_tokens", "failed")
    }
    agreement = shadow.equal_tokens / shadow.tokens if shadow.tokens else None
    return {
        "group": shadow.shadow_group,
        **counts,
        "agreement": None if agreement is None else round(agreement, 4),
        "max_logprob_gap": shadow.max_logprob_gap,
    }


async def _mirror(address: str, request: admin_pb2.SetShadowRequest, tls: Path | None) -> admin_pb2.Mesh:
    async with open_scheduler(address, tls=tls) as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).SetShadow(request, timeout=STATUS_TIMEOUT_S)
    return await fetch_mesh(address, tls=tls)


async def _change(address: str, model: str, weights: dict[str, float], tls: Path | None) -> admin_pb2.Mesh:
    request = admin_pb2.SetTrafficRequest(model=model, weights=weights)
    async with open_scheduler(address, tls=tls) as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).SetTraffic(request, timeout=STATUS_TIMEOUT_S)
    return await fetch_mesh(address, tls=tls)


def _print(traffic: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(traffic)
        return
    console = Console(highlight=False)
    for model, lines in traffic["models"].items():
        table = Table(title=f"traffic of {model}")
        for column in ("group", "weight", "share", "", "ready"):
            table.add_column(column, justify="left" if column in ("group", "") else "right")
        for line in lines:
            bar = "█" * round(line["share"] * _BAR_CELLS)
            note = _note(line)
            table.add_row(
                line["group"], f"{line['weight']:g}", f"{line['share']:.0%}", bar + note, str(line["ready"])
            )
        console.print(table)


def _note(line: dict[str, Any]) -> str:
    if "rolled_back" in line:
        return f" rolled back: {line['rolled_back']}"
    if not line["ready"] and line["weight"]:
        return " (hands its share on)"
    if "shadow" not in line:
        return ""
    shadow = line["shadow"]
    agreement = "nothing compared yet" if shadow["agreement"] is None else f"{shadow['agreement']:.1%} agree"
    return f" {shadow['share']:.0%} mirrored to {shadow['group']}: {agreement}"


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(f"GROUP=WEIGHT: {message}", field="--weights")
