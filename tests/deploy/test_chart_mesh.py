"""What the chart configures is a mesh: its pods, run as processes with their certificates and a key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2
from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from plugins.hash.oracle import continue_tokens
from tests.deploy.chart import Rendered, Values, render
from tests.deploy.processes import Pods, probe
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import MeshClient, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SCHEDULER, GATEWAY, WORKER = "chipmesh-scheduler", "chipmesh-gateway", "chipmesh-worker-hash"
KEY = "cmk_a-key-of-the-tests-0123456789"
STREAMS, TOKENS = 8, 300


def values(model: Path) -> Values:
    served = {"name": "hash", "path": str(model), "load_format": "dummy"}
    group = {
        "name": "hash", "model": "hash", "backend": "hash", "image": "worker-cpu", "replicas": 1,
        "backendOptions": {"step_ms": "5"}, "config": {"load_format": "dummy"},
    }  # fmt: skip
    return {"models": {"served": [served], "pull": []}, "groups": [group]}


class Mesh:
    """The pods, and a client of their gateway."""

    def __init__(self, rendered: Rendered, folder: Path) -> None:
        secrets = {"chipmesh-api-keys": {"default": f"{KEY}\n"}}
        self.pods = Pods(rendered, folder, secrets=secrets)
        self.scheduler = ""
        self.gateway = ""

    def start_scheduler(self) -> None:
        """At the address of the one before, which in a cluster is the Service's."""
        here = {"listen": self.scheduler} if self.scheduler else {}
        self.pods.start(SCHEDULER, f"{SCHEDULER}-0", **here)
        self.scheduler = self.pods.wait_ready(f"{SCHEDULER}-0")["address"]

    def start_gateway(self) -> str:
        """Where its HTTP listens."""
        here = {"openai_listen": "127.0.0.1:0", "scheduler_address": self.scheduler}
        self.pods.start(GATEWAY, f"{GATEWAY}-0", **here)
        return self.pods.wait_http(f"{GATEWAY}-0")

    def start_worker(self) -> str:
        """Where its HTTP listens."""
        executor = {"listen": "127.0.0.1:0", "advertise": "127.0.0.1"}
        self.pods.start(WORKER, f"{WORKER}-0", scheduler_address=self.scheduler, executor=executor)
        return self.pods.wait_http(f"{WORKER}-0")

    def stream(self, prompt: list[int], *, key: str = KEY) -> Iterator[inference_pb2.GenerationEvent]:
        """The events of one generation."""
        client = MeshClient(self.gateway)
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        try:
            request = token_request(prompt, max_tokens=TOKENS)
            for response in client.stub.Generate(request, timeout=60, metadata=metadata):
                yield response.event
        finally:
            client.close()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    model, folder = tmp_path / "model", tmp_path / "pods"
    model.mkdir()
    folder.mkdir()
    mesh = Mesh(render(values(write_hash_model(model))), folder)
    try:
        yield mesh
    finally:
        mesh.pods.stop_all()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_mesh_of_the_charts_pods_serves_tells_probes_the_truth_and_outlives_its_scheduler(
    mesh: Mesh,
) -> None:
    mesh.start_scheduler()
    mesh.pods.stop(f"{SCHEDULER}-0")
    gateway_http = mesh.start_gateway()
    assert probe(gateway_http, "/live") == 200, "alive, and not to be killed"
    assert probe(gateway_http, "/health") == 503, "it has no scheduler, and is not ready"
    worker_http = mesh.start_worker()
    assert probe(worker_http, "/live") == 200, "alive, loaded or not"

    mesh.start_scheduler()
    mesh.gateway = mesh.pods.wait_ready(f"{GATEWAY}-0")["address"]
    mesh.pods.wait_ready(f"{WORKER}-0")
    wait_for(lambda: probe(gateway_http, "/health") == probe(worker_http, "/health") == 200)

    with pytest.raises(grpc.RpcError) as refused:
        next(mesh.stream([1, 2], key=""))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(mesh.scheduler) as plain, pytest.raises(grpc.RpcError) as refused:
        admin_pb2_grpc.AdminServiceStub(plain).GetMesh(admin_pb2.GetMeshRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "plain text gets no answer"

    stopped_at: list[int] = []

    def follow(index: int) -> None:
        prompt, seen = [index, 1, 2, 3], list[int]()
        for event in mesh.stream(prompt):
            seen.extend(event.output.token_ids)
            if index == 0 and not stopped_at and len(seen) > TOKENS // 10:
                stopped_at.append(len(seen))
                mesh.pods.stop(f"{SCHEDULER}-0")
                mesh.start_scheduler()
        assert seen == continue_tokens(prompt, TOKENS, VOCAB_SIZE)

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(follow, range(STREAMS)))
    assert stopped_at, "the scheduler was never stopped, so this has shown nothing"
    assert stopped_at[0] < TOKENS
