"""Asks each service and executor how it is, twice, with a quiet connection held in between."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from chipmesh.device.v1alpha1 import device_pb2, device_pb2_grpc, plugin_pb2, plugin_pb2_grpc
from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.doctor.connections import TIMEOUT_S, Page, fetch, narrowed, open_probe
from meshkit.cli.doctor.facts import ExecutorFacts, LagFacts, ServiceFacts, Target
from meshkit.config import TlsConfig
from meshkit.errors import from_rpc_error
from meshkit.rpc.keepalive import KEEPALIVE

HOLD_S = 4.6 * KEEPALIVE.interval_ms / 1000
"""A server that wants fewer pings ends the connection at the third too many: at the fourth, after four."""
LATE, VERY_LATE = "0.25", "1.0"
"""Bucket bounds of chipmesh_loop_lag_seconds."""
PCI_ADDRESS = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE)
EXECUTOR_ROLE = "worker"
MEMORY_ATTRIBUTE, HOST_MEMORY = "memory", "host"
"""What a device says of itself where its memory is the host's."""


async def fetch_mesh(address: str, *, identity: TlsConfig | None) -> tuple[admin_pb2.Mesh | None, str | None]:
    """The mesh as its scheduler sees it; or None, and why not."""
    async with open_probe(address, role="scheduler", identity=identity) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            response = await stub.GetMesh(admin_pb2.GetMeshRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return None, _words(error)
    mesh: admin_pb2.Mesh = response.mesh
    return mesh, None


async def probe_service(target: Target, *, identity: TlsConfig | None) -> ServiceFacts:
    """Health, version and metrics of one service; loop lag and keepalive over HOLD_S seconds."""
    facts = ServiceFacts(target)
    first = await _metrics(target)
    if target.asked_address is None:
        await asyncio.sleep(HOLD_S)
    else:
        health = _health(target.asked_address, role=target.kind, identity=identity)
        quiet = _holds(target.asked_address, role=target.kind, identity=identity)
        (status, error), kept = await asyncio.gather(health, quiet)
        facts = replace(facts, grpc_health=status, grpc_error=error, keepalive_lost=_not(kept))
    return _with_http(facts, first, await _metrics(target), await _page(target, "/health"))


async def probe_executor(target: Target, address: str, *, identity: TlsConfig | None) -> ExecutorFacts:
    """A worker's executor: its own word on its state, versions and device."""
    facts, kept = await asyncio.gather(
        _ask_executor(target, address, identity=identity),
        _holds(address, role=EXECUTOR_ROLE, identity=identity),
    )
    return replace(facts, keepalive_lost=_not(kept))


async def _ask_executor(target: Target, address: str, *, identity: TlsConfig | None) -> ExecutorFacts:
    async with open_probe(address, role=EXECUTOR_ROLE, identity=identity) as channel:
        plugin = plugin_pb2_grpc.PluginServiceStub(channel)
        devices = device_pb2_grpc.DeviceServiceStub(channel)
        try:
            probe = await plugin.Probe(plugin_pb2.ProbeRequest(), timeout=TIMEOUT_S)
            info = await plugin.GetPluginInfo(plugin_pb2.GetPluginInfoRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return ExecutorFacts(target, error=_words(error))
        facts = ExecutorFacts(
            target,
            readiness=plugin_pb2.ProbeResponse.Readiness.Name(probe.readiness).removeprefix("READINESS_"),
            message=probe.message,
            contract=info.contract_version,
        )
        request = device_pb2.GetDeviceRequest(device=int(target.config.get("device", 0)))
        try:
            device = (await devices.GetDevice(request, timeout=TIMEOUT_S)).device
        except grpc.aio.AioRpcError:
            return (
                facts  # It waits for the device's thread, which may be at a step: then its size is unknown.
            )
    return replace(
        facts,
        on_host=device.attributes.get(MEMORY_ATTRIBUTE) == HOST_MEMORY,
        pci_addresses=_pci_addresses(device.attributes),
    )


def _pci_addresses(attributes: Mapping[str, str]) -> tuple[str, ...]:
    found = {match.lower() for value in attributes.values() for match in PCI_ADDRESS.findall(value)}
    return tuple(sorted(found))


async def _health(address: str, *, role: str, identity: TlsConfig | None) -> tuple[str | None, str | None]:
    """(SERVING or another word, None), or (None, why nobody answered)."""
    async with open_probe(address, role=role, identity=identity) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return None, _words(error)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status), None


async def _holds(address: str, *, role: str, identity: TlsConfig | None) -> bool | None:
    """Whether a connection without a call outlives the pings of our own clients; None: none was made."""
    async with open_probe(address, role=role, identity=identity, alone=True) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
        except asyncio.TimeoutError:
            return None
        try:
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), HOLD_S)
        except asyncio.TimeoutError:
            return True
    return False


def _not(kept: bool | None) -> bool | None:
    return None if kept is None else not kept


def _words(error: grpc.aio.AioRpcError) -> str:
    translated = from_rpc_error(error)
    # gRPC tells of all that it tried before the cause.
    return f"{translated.code.name}: {translated.message.rpartition('last error: ')[2]}"


# ---------------------------------------------------------------- over HTTP


async def _page(target: Target, path: str) -> Page | Exception:
    """A page, or why there is none."""
    if target.http_address is None or target.http_address.startswith("unix:"):
        return OSError("no address of it is known")
    try:
        return await asyncio.to_thread(fetch, target.http_address, path)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return error


async def _metrics(target: Target) -> Page | None:
    """The metrics page; None: there is none."""
    page = await _page(target, "/metrics")
    return None if isinstance(page, Exception) or page.status != 200 else page


def read_samples(page: Page | None) -> dict[str, float]:
    """Values by "name" or "name{label=value}" (for the labels in KEPT only), summed over all others. Nothing
    of a page that holds no metrics.
    """
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families((page.body if page else b"").decode(errors="replace")):
            for sample in family.samples:
                key = _key(sample.name, sample.labels)
                sums[key] = sums.get(key, 0.0) + sample.value
    except ValueError:
        return {}
    return sums


KEPT = ("le", "version")


def _key(name: str, labels: Mapping[str, str]) -> str:
    kept = [f"{label}={labels[label]}" for label in KEPT if label in labels]
    return f"{name}{{{','.join(kept)}}}" if kept else name


def _with_http(
    facts: ServiceFacts, first: Page | None, second: Page | None, health: Page | Exception
) -> ServiceFacts:
    if facts.target.http_address is None:
        return facts
    if isinstance(health, Exception):
        return replace(facts, http_error=str(health) or type(health).__name__)
    report = _json(health.body)
    before, after = read_samples(first), read_samples(second)
    return replace(
        facts,
        http_serving=health.status == 200,
        http_error=None if report else f"/health answers {health.status} with something that is not ours",
        parts={str(name): str(value) for name, value in (report.get("parts") or {}).items()},
        clock=narrowed(first.clock if first else None, health.clock),
        counters=after,
        lag=_lag(before, after),
        version=_version(after),
    )


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _lag(first: Mapping[str, float], second: Mapping[str, float]) -> LagFacts | None:
    """Between the two readings; None where there were not two."""
    total = "chipmesh_loop_lag_seconds_count"
    if total not in first or total not in second:
        return None

    def grown(key: str) -> int:
        return int(second.get(key, 0.0) - first.get(key, 0.0))

    wakeups = grown(total)
    bucket = "chipmesh_loop_lag_seconds_bucket{le=%s}"
    return LagFacts(wakeups, wakeups - grown(bucket % LATE), wakeups - grown(bucket % VERY_LATE))


def _version(samples: Iterable[str]) -> str | None:
    """Of chipmesh_build_info; None where a service has no such metric, as before it had one."""
    prefix = "chipmesh_build_info{version="
    return next((key.removeprefix(prefix).rstrip("}") for key in samples if key.startswith(prefix)), None)
