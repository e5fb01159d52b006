"""Who a certificate's URI names, and what a call with a certificate may do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshkit.errors import PermissionDenied
from meshkit.rpc.peers import peer_uri, read_uri, server_name
from meshkit.rpc.policy import LOCAL, Access, Peer, Role


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.SCHEDULER, Role.WORKER, Role.OPERATOR])
def test_a_uri_names_the_peer_that_it_was_made_for(role: Role) -> None:
    assert read_uri(peer_uri(role, "one")) == Peer(role, "one")


@pytest.mark.parametrize(
    "uri",
    [
        "chipmesh://client/x", "chipmesh://local/x", "chipmesh://worker/", "chipmesh://worker",
        "chipmesh:///x", "https://worker/x", "CHIPMESH://worker/x", "xchipmesh://worker/x", "",
    ],
)  # fmt: skip
def test_any_other_uri_names_nobody(uri: str) -> None:
    assert read_uri(uri) is None


def test_dns_names_tell_roles_and_peers_apart() -> None:
    assert server_name(Role.WORKER) == "worker.chipmesh.internal"
    assert server_name(Role.WORKER, "a") == "a.worker.chipmesh.internal"


def test_a_local_peer_speaks_for_anybody() -> None:
    LOCAL.require_name("worker-a", field="worker_id")


def test_a_role_with_one_name_takes_no_other() -> None:
    access = Access(names={Role.WORKER: "a"}, policy={"/s/m": frozenset({Role.WORKER, Role.SCHEDULER})})
    access.check(Peer(Role.WORKER, "a"), "/s/m")
    access.check(Peer(Role.SCHEDULER, "b"), "/s/m")
    with pytest.raises(PermissionDenied) as caught:
        access.check(Peer(Role.WORKER, "b"), "/s/m")
    assert caught.value.reason == "WRONG_NAME"


def test_a_refusal_says_who_may_and_who_asked() -> None:
    with pytest.raises(PermissionDenied) as caught:
        Access().check(Peer(Role.GATEWAY, "g"), "/chipmesh.scheduler.v1alpha1.AdminService/GetMesh")
    assert "operator, scheduler" in caught.value.message
    assert "gateway 'g'" in caught.value.message


def test_an_executors_interpreter_needs_no_library_for_certificates() -> None:
    """`executor.python` may be a vendor's environment, which lacks it."""
    code = (
        "import sys, worker_svc.executor.app; print([n for n in sys.modules if n.startswith('cryptography')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
