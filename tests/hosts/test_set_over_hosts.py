"""A model over two hosts, a stage on each: it serves, and names the rank whose host is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from chaos.hosts import Network
from chaos.processes import identify, kill, until
from chaos.view import MeshView, replicas_of
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.certificates.folder import CertificateFolder, folder_name
from meshkit.cli.child import Child, last_error_line
from meshkit.cli.scheduler_channel import tls_files
from meshkit.cli.state import ServiceKind, StateDir
from meshkit.cli.stopping import stop_services
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Peer, Role
from plugins.hash.oracle import continue_tokens
from tests.support.golden import Golden, load_golden
from tests.support.mesh import Generation, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

RENDEZVOUS_PORT = 29600
NAMED_WITHIN_S = 10.0
START_S = 90.0
WORKER = "worker-0"
TOKENS = 48
VOCAB = 32_000
ReplicaState = admin_pb2.ReplicaStatus


@dataclass(frozen=True)
class Served:
    """What the set runs. worker, model: as the worker's and the gateway's configurations have them."""

    worker: dict[str, Any]
    model: dict[str, Any]
    prompt: list[int]
    check: Callable[[Sequence[int]], None]


def exact_model() -> Served:
    """Its ranks agree over plain sockets, its tokens are known."""

    def check(tokens: Sequence[int]) -> None:
        assert list(tokens) == continue_tokens([5, 6, 7], TOKENS, VOCAB)

    worker = {"backend": "hash", "backend_options": {"step_ms": "20"}}
    return Served(worker, {"context_length": 4096, "vocab_size": VOCAB}, [5, 6, 7], check)


def real_model() -> Served:
    """Its stages talk over gloo, which binds to the host's name by default, and namespaces share that."""
    golden: Golden = load_golden()[0]
    worker = {"model_path": "smollm2-135m", "dtype": "float32"}
    return Served(worker, {"path": "smollm2-135m"}, golden.prompt_token_ids, golden.check)


@dataclass
class TwoHostMesh:
    """Scheduler, gateway and rank 0 on the left host, rank 1 on the right; TLS among all."""

    network: Network
    state: StateDir
    served: Served
    children: dict[str, Child] = field(default_factory=dict)

    async def start(self) -> None:
        left = self.network["left"].address
        peers = [Peer(Role.SCHEDULER, "scheduler"), Peer(Role.GATEWAY, "gateway"), Peer(Role.WORKER, WORKER),
                 Peer(Role.OPERATOR, "test")]  # fmt: skip
        folder = CertificateFolder(self.state.root / "certificates")
        await asyncio.to_thread(folder.create, peers, lifetime=timedelta(days=1))
        scheduler = await self.spawn("scheduler", "scheduler", "left", peers[0], {
            "groups": [{"name": "default", "model": "m"}],
        })  # fmt: skip
        await self.until_up(scheduler)
        at = {"scheduler_address": self.address("scheduler")}
        gateway = await self.spawn("gateway", "gateway", "left", peers[1], {
            **at, "allow_anonymous": True,
            "models": [{"name": "m", **self.served.model}],
        })  # fmt: skip
        both = [
            await self.spawn(f"rank-{rank}", "worker", host, peers[2], {
                **at, **self.served.worker, "worker_id": WORKER, "model": "m",
                "max_total_tokens": 8192, "page_size": 16, "executors_on_host": 2,
                "tensor_parallel_size": 1, "pipeline_parallel_size": 2,
                "rendezvous": f"{left}:{RENDEZVOUS_PORT}", "first_rank": rank, "join_timeout_s": 60.0,
                "executor": {
                    "listen": f"{self.network[host].address}:0",
                    "environment": {"GLOO_SOCKET_IFNAME": "eth0"},
                },
            })
            for rank, host in enumerate(("left", "right"))
        ]  # fmt: skip
        for child in (gateway, *both):
            await self.until_up(child)

    async def spawn(
        self, name: str, kind: ServiceKind, host: str, peer: Peer, config: dict[str, Any]
    ) -> Child:
        listen = f"{self.network[host].address}:0"
        files = tls_files(self.state.root / "certificates" / folder_name(peer))
        assert files is not None
        own = {"listen": listen, "http_listen": listen, "tls": files.model_dump(mode="json"),
               "ready_file": str(self.state.ready_file(name))}  # fmt: skip
        within = self.network[host].enter
        child = self.children[name] = await asyncio.to_thread(
            lambda: Child(name, kind, config={**own, **config}, state=self.state, within=within)
        )
        return child

    async def until_up(self, child: Child) -> None:
        def is_up() -> bool:
            assert child.exit_code() is None, f"{child.name}: {last_error_line(child.log)}"
            return child.read_ready() is not None

        await until(is_up, timeout_s=START_S, what=f"{child.name} is ready", poll_s=0.05)

    def address(self, name: str) -> str:
        return str(self.children[name].record().address)

    def log(self, name: str) -> str:
        return self.children[name].log.read_text(encoding="utf-8")

    async def stop(self) -> list[str]:
        """What was wrong with the ends."""
        children = self.children
        records = [child.record() for child in children.values()]
        await asyncio.to_thread(stop_services, records, report=lambda _: None)
        await until(
            lambda: all(child.exit_code() is not None for child in children.values()),
            timeout_s=30,
            what="services exit",
        )
        codes = {name: child.exit_code() for name, child in children.items()}
        return [f"{name} ended with {code}" for name, code in codes.items() if code]


@pytest.fixture(params=[exact_model, pytest.param(real_model, marks=pytest.mark.nightly)])
async def mesh(
    two_hosts: Network, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[TwoHostMesh]:
    state = StateDir(tmp_path / "state")
    state.prepare()
    mesh = TwoHostMesh(two_hosts, state, request.param())
    try:
        await mesh.start()
        yield mesh
    finally:
        problems = await mesh.stop()
    assert problems == []


@pytest.fixture
async def view(mesh: TwoHostMesh) -> AsyncIterator[MeshView]:
    files = tls_files(mesh.state.root / "certificates" / folder_name(Peer(Role.OPERATOR, "test")))
    view = MeshView(lambda: mesh.address("scheduler"), tls=files)
    yield view
    await view.close()


async def generate(mesh: TwoHostMesh) -> None:
    """The right tokens, over both hosts."""
    async with open_channel(mesh.address("gateway"), traced=False) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        generation: Generation | None = None
        request = token_request(mesh.served.prompt, max_tokens=TOKENS)
        async for response in stub.Generate(request, timeout=120):
            if generation is None:
                generation = Generation(response.event.accepted)
            else:
                generation.add(response.event)
    assert generation is not None
    mesh.served.check(generation.token_ids)


def is_ready(mesh: admin_pb2.Mesh) -> bool:
    return any(each.state == ReplicaState.STATE_READY for each in replicas_of(mesh))


async def test_a_pipeline_over_two_hosts_serves_and_names_the_rank_whose_host_is_cut_off(
    mesh: TwoHostMesh, view: MeshView
) -> None:
    right = mesh.network["right"].address
    await view.first_time(is_ready, timeout_s=START_S)
    (replica,) = replicas_of(await view.mesh())
    assert (replica.tensor_parallel_size, replica.pipeline_parallel_size) == (1, 2)
    assert [each.address.rpartition(":")[0] for each in replica.ranks] == [
        mesh.network["left"].address,
        right,
    ]
    await generate(mesh)

    stream = asyncio.create_task(generate(mesh))
    await view.first_time(lambda mesh: any(each.running for each in replicas_of(mesh)), timeout_s=30)
    await mesh.network.cut("right")
    try:
        await view.first_time(
            lambda mesh: any(f"rank 1 at {right}:" in each.message for each in replicas_of(mesh)),
            timeout_s=NAMED_WITHIN_S,
        )
        await until(
            lambda: f"rank 0 at {mesh.network['left'].address}" in mesh.log("rank-1"),
            timeout_s=NAMED_WITHIN_S,
            what="the other side names the leader",
            poll_s=0.1,
        )
    finally:
        await mesh.network.join("right")
    await view.first_time(is_ready, timeout_s=START_S)
    await asyncio.wait_for(stream, START_S)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [1, 0])
async def test_a_ranks_death_on_one_host_starts_all_ranks_again_on_both(
    mesh: TwoHostMesh, view: MeshView, rank: int
) -> None:
    await view.first_time(is_ready, timeout_s=START_S)
    (before,) = replicas_of(await view.mesh())
    await kill([identify(before.ranks[rank].pid)])
    await view.first_time(
        lambda mesh: is_ready(mesh) and replicas_of(mesh)[0].instance_id != before.instance_id,
        timeout_s=START_S,
    )
    (after,) = replicas_of(await view.mesh())
    assert not {each.pid for each in before.ranks} & {each.pid for each in after.ranks}
    await generate(mesh)
