"""Which services are looked at: by configuration files and the ready files that these name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.doctor import best_copy
from meshkit.cli.doctor.probe_ports import addresses_of
from meshkit.cli.doctor.proc import Proc
from meshkit.cli.doctor.targets import find_targets, read_target
from meshkit.cli.state import StateDir
from meshkit.errors import FailedPrecondition

MODELS = [{"name": "m", "context_length": 64}]


def write(file: Path, **content: Any) -> Path:
    file.write_text(json.dumps(content))
    return file


def find(tmp_path: Path, *configs: Path, endpoint: str | None = None, gateway: str | None = None) -> Any:
    state = StateDir(tmp_path / "state")
    return find_targets(state=state, proc=Proc(), endpoint=endpoint, gateway=gateway, configs=configs)


def test_the_kind_of_a_service_is_seen_by_its_fields(tmp_path: Path) -> None:
    worker = write(tmp_path / "w.json", worker_id="a", model="m", scheduler_address="127.0.0.1:7")
    gateway = write(tmp_path / "gateway-1.json", models=MODELS, scheduler_address="127.0.0.1:7")
    scheduler = write(tmp_path / "s.json", listen="127.0.0.1:7")
    targets = find(tmp_path, worker, gateway, scheduler)
    assert [(each.name, each.kind) for each in targets] == [
        ("a", "worker"), ("gateway-1", "gateway"), ("scheduler", "scheduler"),
    ]  # fmt: skip


def test_defaults_of_the_services_own_model_are_known(tmp_path: Path) -> None:
    target = read_target(write(tmp_path / "scheduler.json", listen="127.0.0.1:7"), proc=Proc())
    assert target.config["lease_duration_s"] == 1.0
    assert target.config_error is None


def test_a_wrong_configuration_is_told_and_not_raised(tmp_path: Path) -> None:
    wrong = read_target(write(tmp_path / "scheduler.json", lease_duration_s="long"), proc=Proc())
    assert "lease_duration_s" in str(wrong.config_error)
    (tmp_path / "no.json").write_text("{")
    assert "no JSON" in str(read_target(tmp_path / "no.json", proc=Proc()).config_error)


def test_addresses_and_pids_are_those_of_the_ready_file(tmp_path: Path) -> None:
    ready = write(
        tmp_path / "ready.json", pid=7, address="0.0.0.0:1", http_address="127.0.0.1:2",
        executor_pid=8, executor_address="127.0.0.1:3",
    )  # fmt: skip
    config = write(
        tmp_path / "w.json", worker_id="a", model="m", scheduler_address="127.0.0.1:7", ready_file=str(ready)
    )
    target = read_target(config, proc=Proc())
    assert (target.address, target.http_address, target.executor_address) == (
        "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3",
    )  # fmt: skip
    assert (target.pid, target.executor_pid) == (7, 8)


def test_without_a_ready_file_a_fixed_port_is_an_address_and_port_0_is_none(tmp_path: Path) -> None:
    target = read_target(
        write(tmp_path / "s.json", listen="0.0.0.0:7", http_listen="127.0.0.1:0"), proc=Proc()
    )
    assert (target.address, target.http_address) == ("127.0.0.1:7", None)


def test_the_scheduler_is_where_the_others_say_unless_it_is_named(tmp_path: Path) -> None:
    gateway = write(tmp_path / "gateway.json", models=MODELS, scheduler_address="10.0.0.1:7")
    assert [each.address for each in find(tmp_path, gateway) if each.kind == "scheduler"] == ["10.0.0.1:7"]
    named = find(tmp_path, gateway, endpoint="10.0.0.2:7")
    assert [each.address for each in named if each.kind == "scheduler"] == ["10.0.0.2:7"]


def test_a_gateway_that_is_named_is_looked_at_too(tmp_path: Path) -> None:
    targets = find(tmp_path, endpoint="10.0.0.1:7", gateway="10.0.0.1:8")
    assert [(each.kind, each.address) for each in targets] == [
        ("scheduler", "10.0.0.1:7"), ("gateway", "10.0.0.1:8"),
    ]  # fmt: skip


def test_with_nothing_named_and_no_mesh_up_the_ways_out_are_told(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="--endpoint"):
        find(tmp_path)


def test_the_best_copy_is_kept_and_a_slower_one_does_not_replace_it(tmp_path: Path) -> None:
    assert best_copy.recall(tmp_path) is None
    assert best_copy.keep(tmp_path, 9e9)
    assert best_copy.keep(tmp_path, 4e9)
    assert best_copy.recall(tmp_path) == 9e9
    assert not best_copy.keep(tmp_path / best_copy.FILE, 10e9), "a folder that cannot be written"


def test_the_openai_listener_of_a_gateway_is_an_address_to_look_at(tmp_path: Path) -> None:
    fields = {"models": [{"name": "m", "context_length": 9}], "scheduler_address": "127.0.0.1:7"}
    target = read_target(
        write(tmp_path / "gateway.json", listen="127.0.0.1:8", openai_listen="0.0.0.0:9", **fields),
        proc=Proc(),
    )
    assert [each[:2] for each in addresses_of(target)] == [
        ("grpc", "127.0.0.1:8"),
        ("openai", "127.0.0.1:9"),
    ]
    without = read_target(write(tmp_path / "gateway.json", listen="127.0.0.1:8", **fields), proc=Proc())
    assert [each[0] for each in addresses_of(without)] == ["grpc"]
