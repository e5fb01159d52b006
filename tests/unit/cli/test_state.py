"""The state folder: one mesh at a time, found again by later commands, not confused by leftovers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshkit.cli.processes import ProcessRecord, record_process
from meshkit.cli.state import (
    MeshRecord,
    ServiceRecord,
    StateDir,
    environment_prefix,
    reachable,
    require_endpoint,
    state_dir_from_environment,
)
from meshkit.errors import AlreadyExists, FailedPrecondition


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    state.prepare()
    return state


def mesh_of(process: ProcessRecord) -> MeshRecord:
    """A mesh whose launcher and gateway are that process."""
    gateway = ServiceRecord(
        name="gateway", kind="gateway", process=process, address="0.0.0.0:50", log=Path("log")
    )
    return MeshRecord(phase="ready", launcher=process, model="m", services=(gateway,))


def own_process() -> ProcessRecord:
    record = record_process(os.getpid())
    assert record is not None
    return record


def ended_process() -> ProcessRecord:
    """This process' pid with another start: what a reused pid looks like."""
    return ProcessRecord(pid=os.getpid(), start_ticks=own_process().start_ticks - 1)


def test_the_folder_is_private_to_its_user(state: StateDir) -> None:
    assert state.root.stat().st_mode & 0o077 == 0


def test_a_live_mesh_refuses_a_second_one_in_its_folder(state: StateDir) -> None:
    state.write_mesh(mesh_of(own_process()))
    with pytest.raises(AlreadyExists, match="chipmesh down"), state.locked():
        pytest.fail("the lock was given")


def test_what_a_dead_mesh_left_does_not_hinder_a_new_one(state: StateDir) -> None:
    state.write_mesh(mesh_of(ended_process()))
    with state.locked():
        assert state.read_mesh() is not None


def test_two_launchers_at_once_are_told_apart_before_any_mesh_is_recorded(state: StateDir) -> None:
    with state.locked(), pytest.raises(AlreadyExists, match="at work"), state.locked():
        pytest.fail("the lock was given twice")


def test_a_record_survives_the_way_through_its_file(state: StateDir) -> None:
    record = mesh_of(own_process())
    state.write_mesh(record)
    assert state.read_mesh() == record
    state.forget_mesh()
    state.forget_mesh()
    assert state.read_mesh() is None


def test_a_damaged_record_is_named_and_not_ignored(state: StateDir) -> None:
    state.mesh_file.write_text("{}")
    with pytest.raises(FailedPrecondition, match=r"mesh\.json"):
        state.read_mesh()


def test_a_client_finds_the_gateway_of_a_live_mesh_on_loopback(state: StateDir) -> None:
    state.write_mesh(mesh_of(own_process()))
    assert require_endpoint(state, kind="gateway", given=None) == "127.0.0.1:50"
    assert require_endpoint(state, kind="gateway", given="elsewhere:1") == "elsewhere:1"


@pytest.mark.parametrize("left_over", [True, False])
def test_a_client_without_a_mesh_is_told_how_to_get_one(left_over: bool, state: StateDir) -> None:
    if left_over:
        state.write_mesh(mesh_of(ended_process()))
    with pytest.raises(FailedPrecondition, match="chipmesh up"):
        require_endpoint(state, kind="gateway", given=None)


def test_a_bound_address_that_is_no_wildcard_stays() -> None:
    assert reachable("10.0.0.1:5") == "10.0.0.1:5"
    assert reachable("[::]:5") == "127.0.0.1:5"


def test_the_environment_chooses_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHIPMESH_STATE_DIR", str(tmp_path / "a b"))
    assert state_dir_from_environment().root == tmp_path / "a b"
    assert environment_prefix(state_dir_from_environment()) == f"CHIPMESH_STATE_DIR='{tmp_path}/a b' "
    monkeypatch.delenv("CHIPMESH_STATE_DIR")
    assert environment_prefix(state_dir_from_environment()) == ""


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match="CHIPMESH_STATE_DIR"):
        StateDir(tmp_path / "file" / "state").prepare()
