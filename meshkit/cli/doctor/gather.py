"""Runs all probes beside each other and puts what they saw into one set of facts."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from chipmesh.scheduler.v1alpha1.admin_pb2 import Mesh
from meshkit.cli.doctor import best_copy
from meshkit.cli.doctor.facts import (
    CertificateFacts,
    ExecutorFacts,
    Facts,
    HostFacts,
    ProcessFacts,
    Target,
    WorkerNeed,
)
from meshkit.cli.doctor.finding import named
from meshkit.cli.doctor.probe_certificates import CertificateFiles, read_authority, read_set, sets_in, sets_of
from meshkit.cli.doctor.probe_chips import find_chips
from meshkit.cli.doctor.probe_host import describe_host, family_of, look, measure_copy
from meshkit.cli.doctor.probe_ports import does_speak, probe_ports, with_pids
from meshkit.cli.doctor.probe_services import fetch_mesh, probe_executor, probe_service
from meshkit.cli.doctor.proc import Proc
from meshkit.config import TlsConfig
from meshkit.errors import FailedPrecondition

LOOK_S = 1.5
ADMINISTRATORS = ("operator", "scheduler")
WEIGHT_FILES = ("*.safetensors", "*.gguf")


@dataclass(frozen=True)
class Surroundings:
    """Where it looks. proc: /proc and control groups; sysfs: PCI devices; state: what it remembers."""

    proc: Proc
    sysfs: Path
    state: Path


async def gather_facts(targets: Sequence[Target], *, around: Surroundings, tls: Path | None) -> Facts:
    """Everything that the checks need; takes about as long as a quiet connection is held.

    Raises:
        FailedPrecondition: services ask for a certificate, and none is there.
    """
    identity = _identity(targets, tls)
    ports = await probe_ports(targets, proc=around.proc)
    targets = with_pids(targets, ports)
    services, executors, host = await asyncio.gather(
        asyncio.gather(
            *(probe_service(each, identity=_for(each, identity)) for each in targets if _can_ask(each))
        ),
        asyncio.gather(
            *(
                probe_executor(each, each.executor_address, identity=_for(each, identity))
                for each in targets
                if each.executor_address
            )
        ),
        asyncio.to_thread(_look_at_host, targets, around),
    )
    # Last: by now the scheduler has noticed whom it does not hear any more.
    mesh, mesh_error = await _mesh(targets, identity=identity)
    return Facts(
        now=datetime.now(timezone.utc),
        own_version=metadata.version("chipmesh"),
        targets=targets,
        mesh=mesh,
        mesh_error=mesh_error,
        services=tuple(services),
        executors=tuple(executors),
        ports=tuple(replace(port, speaks=does_speak(port, services, executors)) for port in ports),
        processes=_processes(targets, mesh, proc=around.proc),
        host=host,
        chips=find_chips(around.sysfs, used={pci for each in executors for pci in each.pci_addresses}),
        certificates=_certificates(targets, tls),
        needs=_needs(targets, executors, mesh),
    )


def _can_ask(target: Target) -> bool:
    return target.address is not None or target.http_address is not None


async def _mesh(targets: Sequence[Target], *, identity: TlsConfig | None) -> tuple[Mesh | None, str | None]:
    for target in targets:
        if target.kind == "scheduler" and target.address is not None:
            return await fetch_mesh(target.address, identity=_for(target, identity))
    return None, None


def _for(target: Target, identity: TlsConfig | None) -> TlsConfig | None:
    """TLS where the service says so, or where nothing is known of it but the doctor has a certificate."""
    is_plain = target.kind == "gateway" or (target.config and not target.config.get("tls"))
    return None if is_plain else identity


def _identity(targets: Iterable[Target], tls: Path | None) -> TlsConfig | None:
    """What the doctor shows: the operator's set in `tls`, or the scheduler's own where that is on this host,
    which may administer itself.

    Raises:
        FailedPrecondition: there is none, and services ask for it.
    """
    for files in _sets_in(tls):
        if files.authority is not None and read_set(files).role in ADMINISTRATORS:
            return TlsConfig(certificate=files.certificate, key=files.key, authority=files.authority)
    for target in targets:
        if target.kind == "scheduler" and target.config.get("tls") and tls is None:
            return TlsConfig(**target.config["tls"])
    asking = [target.name for target in targets if target.kind != "gateway" and target.config.get("tls")]
    if asking:
        raise FailedPrecondition(
            f"{named(asking)} ask for a certificate: name an operator's with --tls DIR or CHIPMESH_TLS "
            "(chipmesh certs create DIR --operator NAME makes one)",
            field="--tls",
        )
    return None


def _sets_in(tls: Path | None) -> list[CertificateFiles]:
    return [] if tls is None else list(sets_in(tls))


def _certificates(targets: Iterable[Target], tls: Path | None) -> tuple[CertificateFacts, ...]:
    """Each set once, as the configuration that names it knows whose it is."""
    sets = {files.certificate.absolute(): files for files in (*_sets_in(tls), *sets_of(targets))}
    found = [read_set(files) for files in sets.values()]
    authority = read_authority(tls) if tls is not None else None
    return tuple(found if authority is None else [authority, *found])


# ---------------------------------------------------------------- this host


def _pids(targets: Iterable[Target], mesh: Mesh | None, *, proc: Proc) -> list[tuple[Target, str, int]]:
    """(target, "service" or "executor", pid) of each process that is known to be on this host."""
    found: list[tuple[Target, str, int]] = [
        (target, "service", target.pid) for target in targets if target.pid is not None
    ]
    for target in targets:
        pid = _executor_pid(target, mesh)
        # The scheduler tells the latest pid of an executor, on whichever host: a child of ours is here.
        if pid is not None and (pid == target.executor_pid or proc.parent_of(pid) == target.pid):
            found.append((target, "executor", pid))
    return found


def _executor_pid(target: Target, mesh: Mesh | None) -> int | None:
    if target.pid is None:
        return None
    told = [
        replica.executor_pid
        for group in (mesh.groups if mesh is not None else ())
        for replica in group.replicas
        if replica.worker == target.name and replica.supervisor_pid == target.pid
    ]
    return told[0] if told else target.executor_pid


def _processes(targets: Iterable[Target], mesh: Mesh | None, *, proc: Proc) -> tuple[ProcessFacts, ...]:
    return tuple(
        proc.facts_of(
            pid,
            owner=target.executor_name if kind == "executor" else target.name,
            service=target.name,
            kind="executor" if kind == "executor" else "service",
        )
        for target, kind, pid in _pids(targets, mesh, proc=proc)
    )


def _look_at_host(targets: Sequence[Target], around: Surroundings) -> HostFacts:
    proc = around.proc
    before = look(proc)
    rate = measure_copy()
    # Of a shorter time the ticks (10 ms) of many processes are a coarse measure.
    time.sleep(max(0.0, LOOK_S - (time.monotonic() - before.at)))
    after = look(proc)
    best = best_copy.recall(around.state)
    best_copy.keep(around.state, rate)
    roots = {pid for _, _, pid in _pids(targets, None, proc=proc)}
    ours = family_of(proc, {*roots, os.getpid()})
    return describe_host(proc, before, after, ours=ours, copy_rate=rate, best=best)


# ---------------------------------------------------------------- memory that workers need


def _needs(
    targets: Iterable[Target], executors: Iterable[ExecutorFacts], mesh: Mesh | None
) -> tuple[WorkerNeed, ...]:
    """Of workers whose device is the host: elsewhere weights and cache lie in the chip's own memory."""
    on_host = {each.target.name for each in executors if each.on_host}
    tokens = {
        replica.worker: replica.pages.total * replica.page_size_tokens
        for group in (mesh.groups if mesh is not None else ())
        for replica in group.replicas
    }
    return tuple(
        WorkerNeed(
            target.name,
            weights=_weights(target),
            kv_cache=tokens.get(target.name, 0) * _token_bytes(target),
        )
        for target in targets
        if target.name in on_host
    )


def _weights(target: Target) -> int:
    """Bytes of the files that hold them; 0 where none are loaded, or the model is named and not a path."""
    path = Path(str(target.config.get("model_path") or "/nonexistent"))
    if target.config.get("load_format") == "dummy" or not path.exists():
        return 0
    files = [path] if path.is_file() else [file for each in WEIGHT_FILES for file in path.glob(each)]
    return sum(file.stat().st_size for file in files)


def _token_bytes(target: Target) -> int:
    """Of one token in the KV cache, at two bytes a number; 0 where the model does not say."""
    file = Path(str(target.config.get("model_path") or "/nonexistent")) / "config.json"
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
        heads = int(model["num_attention_heads"])
        head_size = int(model.get("head_dim") or model["hidden_size"] // heads)
        return (
            2
            * 2
            * int(model["num_hidden_layers"])
            * int(model.get("num_key_value_heads") or heads)
            * head_size
        )
    except (OSError, ValueError, KeyError, TypeError):
        return 0
