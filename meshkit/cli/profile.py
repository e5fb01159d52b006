"""`chipmesh profile`: where a worker's time goes, as a table; and a trace that ui.perfetto.dev opens."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.scheduler_channel import open_scheduler
from meshkit.cli.state import require_endpoint, state_dir_from_environment
from meshkit.cli.terminal import print_json
from meshkit.errors import Internal, InvalidArgument

WRITING_S = 90.0
"""For the trace to be written and sent, beyond the recording."""
_TICK_S = 0.1
_TABLE_WIDTH = 110
_KIB = 1024


def profile_worker(
    worker: str, *, seconds: float, output: Path | None, endpoint: str | None, tls: Path | None, as_json: bool
) -> None:
    """Record, write the trace, show the sums. worker: "" for the only one. tls: as for `open_scheduler`.

    Raises:
        MeshError: the worker is not there, is being profiled already, or has no model; or the file cannot be
            written.
    """
    address = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as bars:
        response = asyncio.run(_profile(address, worker, seconds, bars, tls))
    file = output or Path(f"chipmesh-profile-{response.worker}.json")
    try:
        file.write_bytes(response.chrome_trace)
    except OSError as error:
        raise InvalidArgument(
            f"--output {file} cannot be written ({error.strerror}); name another file", field="--output"
        ) from error
    summary = {"worker": response.worker, "trace": str(file), **read_summary(response.chrome_trace)}
    if as_json:
        print_json(summary)
    else:
        print_profile(summary)


def read_summary(trace: bytes) -> dict[str, Any]:
    """The sums that a trace of ours carries.

    Raises:
        Internal: it carries none.
    """
    try:
        summary = json.loads(trace)["chipmesh"]
    except (ValueError, KeyError, TypeError) as error:
        raise Internal("the executor sent a trace without sums; is it of another release?") from error
    if not isinstance(summary, dict):
        raise Internal("the executor sent a trace whose sums are no object")
    return summary


async def _profile(
    address: str, worker: str, seconds: float, bars: Progress, tls: Path | None
) -> admin_pb2.ProfileResponse:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    async with open_scheduler(address, tls=tls) as channel:
        call = admin_pb2_grpc.AdminServiceStub(channel).Profile(
            admin_pb2.ProfileRequest(worker=worker, duration=duration), timeout=seconds + WRITING_S
        )
        return await _watched(call, worker or "the worker", seconds, bars)


async def _watched(
    call: grpc.aio.UnaryUnaryCall[Any, admin_pb2.ProfileResponse], name: str, seconds: float, bars: Progress
) -> admin_pb2.ProfileResponse:
    """The answer of `call`, with a bar for as long as it records."""
    bar = bars.add_task(f"recording {name}", total=seconds)
    waiting, begun = asyncio.ensure_future(call), time.monotonic()
    try:
        while not (await asyncio.wait({waiting}, timeout=_TICK_S))[0]:
            passed = time.monotonic() - begun
            label = f"recording {name}" if passed < seconds else "waiting for the trace"
            bars.update(bar, completed=min(passed, seconds), description=label)
        return waiting.result()
    finally:
        waiting.cancel()


def print_profile(summary: dict[str, Any]) -> None:
    """For people, on stdout."""
    console = Console(highlight=False, width=max(Console().width, _TABLE_WIDTH))
    console.print(
        f"{summary['worker']} ({summary.get('chip', '')}, {summary.get('model', '')}): "
        f"{summary['steps']} steps in {summary['seconds']:.2f} s, {summary['prefill_tokens']} prompt tokens, "
        f"{summary['sampled_tokens']} tokens made",
        markup=False,
        soft_wrap=True,
    )
    if summary["classes"]:
        console.print(_table(summary))
    for line in _lines(summary):
        console.print(line, markup=False, soft_wrap=True)


def _table(summary: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("class", "operator", "ms", "share", "calls", "us/call", "by"):
        right = column in ("ms", "share", "calls", "us/call")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "by")
    for line in summary["classes"]:
        own = [each for each in summary["operators"] if each["class"] == line["class"]]
        by = _by(line["native"], ", ".join(line["programs"]))
        table.add_row(line["class"], "", *_numbers(line), by)
        if len(own) > 1 or any("size_bytes" in each for each in own):
            for each in own:
                table.add_row("", _operator(each), *_numbers(each), _by(each["native"], each["program"]))
    return table


def _operator(line: dict[str, Any]) -> str:
    """Its name; of a collective also what a call carries."""
    name = str(line["operator"])
    if not line.get("size_bytes"):
        return name
    size = line["size_bytes"] / line["calls"]
    return f"{name}, {size / _KIB:.1f} KiB a call" if size >= _KIB else f"{name}, {size:.0f} B a call"


def _numbers(line: dict[str, Any]) -> tuple[str, str, str, str]:
    calls, seconds = line["calls"], line["seconds"]
    each = f"{seconds / calls * 1e6:.1f}" if calls else ""
    return f"{seconds * 1e3:.1f}", f"{line['share']:.1%}", "" if calls is None else str(calls), each


def _by(native: bool | None, program: str) -> str:
    return program if native is None else f"{'native' if native else 'fallback'}: {program}"


def _communication_lines(communication: dict[str, Any]) -> list[str]:
    milliseconds, share = communication["seconds"] * 1e3, communication["overlap_share"]
    waited = communication["waited_s"] * 1e3
    under_way = f"communication under way {milliseconds:.1f} ms, {share:.1%} of it behind computing"
    lines = [f"{under_way}; steps waited {waited:.1f} ms for it"]
    step = communication["per_step"]
    if step["steps"]:
        seconds, behind, held = (step[name] * 1e3 for name in ("seconds", "overlapped_s", "waited_s"))
        lines.append(
            f"a step (mean of {step['steps']}): {seconds:.3f} ms under way, {behind:.3f} ms behind "
            f"computing, {held:.3f} ms waited for"
        )
    return lines


def _lines(summary: dict[str, Any]) -> list[str]:
    communication = summary["communication"]
    busy_ms, idle_ms = summary["step_s"] * 1e3, summary["idle_s"] * 1e3
    lines = [f"device busy {busy_ms:.1f} ms, idle {idle_ms:.1f} ms ({summary['idle_share']:.1%} of the time)"]
    if communication["seconds"]:
        lines += _communication_lines(communication)
    lines += [f"note: {note}" for note in summary["notes"]]
    lines.append(f"trace: {summary['trace']} (open it in ui.perfetto.dev)")
    return lines
