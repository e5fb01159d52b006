"""Admission at a gateway: bounds with hints, deadlines, shares of keys, refusals that are counted."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import httpx2

from meshkit.errors import DeadlineExceeded, ResourceExhausted
from tests.contract.gateway.gateway_client import Mesh, MeshFactory

A, B = "cmk_the-key-of-team-a", "cmk_the-key-of-team-b"


def keys(**fields_of_a: Any) -> dict[str, Any]:
    entries = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in (("team-a", A), ("team-b", B))
    ]
    return {"api_keys": [{**entries[0], **fields_of_a}, entries[1]]}


async def refused(mesh: Mesh) -> dict[str, float]:
    """`refused_requests` as exposed: those above 0, by "key/reason"."""
    async with httpx2.AsyncClient() as client:
        lines = (await client.get(f"http://{mesh.http_address}/metrics")).text.splitlines()
    name = "chipmesh_refused_requests_total{"
    found = {}
    for line in lines:
        if line.startswith(name):
            labels, _, value = line.removeprefix(name).rpartition("} ")
            key, reason = (each.partition("=")[2].strip('"') for each in labels.split(","))
            if float(value):
                found[f"{key}/{reason}"] = float(value)
    return found


async def test_the_scheduler_is_told_whose_request_it_is(run_mesh: MeshFactory) -> None:
    async with run_mesh(**keys()) as mesh:
        session = await mesh.session()
        for key, name in ((A, "team-a"), (B, "team-b")):
            stream = mesh.with_key(key).generate("hi")
            request = await session.accepts()
            assert request.submit.owner == name
            request.finished()
            await stream.end()


async def test_a_refusal_of_the_scheduler_keeps_its_time_to_come_back(run_mesh: MeshFactory) -> None:
    async with run_mesh() as mesh:
        session = await mesh.session()
        stream = mesh.generate("hi")
        request = await session.submitted()
        failed = {
            "code": grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
            "reason": "QUEUE_FULL",
            "message": "full",
        }
        session.send(request.failed_event(**failed, retry_after_ms=7250))
        error = await stream.error()
        assert isinstance(error, ResourceExhausted)
        assert error.retry_after_s == 7.25
        assert await refused(mesh) == {"/QUEUE_FULL": 1.0}


async def test_a_keys_flood_leaves_places_at_the_gateway_to_another(run_mesh: MeshFactory) -> None:
    async with run_mesh(max_live_requests=2, **keys()) as mesh:
        session = await mesh.session()
        flood = [mesh.with_key(A).generate("hi") for _ in range(2)]
        requests = [await session.accepts() for _ in flood]
        error = await mesh.with_key(A).generate("hi").error()
        assert error.reason == "TOO_MANY_REQUESTS"
        other = mesh.with_key(B).generate("hi")
        requests.append(await session.accepts())
        for request in requests:
            request.finished()
        for stream in (*flood, other):
            await stream.end()
        assert await refused(mesh) == {"team-a/TOO_MANY_REQUESTS": 1.0}


async def test_prompt_tokens_at_a_gateway_are_bounded(run_mesh: MeshFactory) -> None:
    async with run_mesh(max_live_prompt_tokens=40) as mesh:
        session = await mesh.session()
        first = mesh.generate(list(range(30)))
        request = await session.accepts()
        error = await mesh.generate(list(range(11))).error()
        assert isinstance(error, ResourceExhausted)
        assert error.metadata["bound"] == "max_live_prompt_tokens"
        second = mesh.generate(list(range(10)))
        for each in (request, await session.accepts()):
            each.finished()
        for stream in (first, second):
            await stream.end()


async def test_a_deadline_that_passes_in_the_queue_of_the_scheduler_ends_the_request_there_too(
    run_mesh: MeshFactory,
) -> None:
    async with run_mesh() as mesh:
        session = await mesh.session()
        stream = mesh.generate("hi", timeout=0.3)
        request = await session.submitted()
        assert 0 < request.submit.deadline_ms <= 300
        request.queued()  # And no place in a batch ever after.
        assert await request.ended_by_gateway() == "cancel"
        assert isinstance(await stream.error(), DeadlineExceeded)


async def test_a_deadline_passes_while_no_scheduler_is_there(run_mesh: MeshFactory) -> None:
    async with run_mesh(scheduler_up=False, accept_timeout_s=30.0) as mesh:
        assert isinstance(await mesh.generate("hi", timeout=0.2).error(), DeadlineExceeded)


async def test_a_key_asks_for_no_more_priority_than_it_was_given(run_mesh: MeshFactory) -> None:
    async with run_mesh(**keys(max_priority=3)) as mesh:
        session = await mesh.session()
        error = await mesh.with_key(A).generate("hi", scheduling={"priority": 4}).error()
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "scheduling.priority")
        stream = mesh.with_key(A).generate("hi", scheduling={"priority": 3})
        request = await session.accepts()
        assert request.submit.priority == 3
        request.finished()
        await stream.end()
