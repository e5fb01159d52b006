"""What was found is written as `up` reads it, and touches nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshkit.cli.options import GroupOptions
from meshkit.cli.tuning.groups_file import check_output, write_group
from meshkit.cli.tuning.space import DEFAULT, Setting
from meshkit.cli.up import read_groups
from meshkit.errors import FailedPrecondition, InvalidArgument

TUNED = GroupOptions(name="b", devices="cpu:1", model_path="/models/m", max_running_requests=4)
OTHER = {"name": "a", "devices": "cpu:0", "weight": 3.0, "guard": {"max_ttft_s": 2}}


def existing(folder: Path, *groups: object) -> Path:
    file = folder / "groups.json"
    file.write_text(json.dumps({"groups": list(groups)}), encoding="utf-8")
    return file


def test_a_new_file_has_the_group_that_was_tuned_with_what_was_found(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    check_output(file, TUNED, name="b")
    write_group(file, Setting(128, 16, 0.02), name="b", group=TUNED)
    (group,) = read_groups(file)
    assert group == TUNED.model_copy(
        update={"chunked_prefill_size": 128, "max_running_requests": 16, "step_window_s": 0.02}
    )


def test_the_default_is_written_as_what_was_given(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    write_group(file, DEFAULT, name="b", group=TUNED)
    assert read_groups(file) == (TUNED,)


def test_other_groups_and_other_fields_of_a_file_stay(tmp_path: Path) -> None:
    file = existing(tmp_path, OTHER, {"name": "b", "devices": "cpu:7", "weight": 2.0, "page_size": 8})
    check_output(file, None, name="b")
    write_group(file, Setting(chunked_prefill_size=64), name="b", group=None)
    assert json.loads(file.read_text(encoding="utf-8"))["groups"] == [
        OTHER,
        {"name": "b", "devices": "cpu:7", "weight": 2.0, "page_size": 8, "chunked_prefill_size": 64},
    ]


def test_a_group_that_a_file_lacks_is_added(tmp_path: Path) -> None:
    file = existing(tmp_path, OTHER)
    check_output(file, TUNED, name="b")
    write_group(file, DEFAULT, name="b", group=TUNED)
    assert [group.name for group in read_groups(file)] == ["a", "b"]


def test_a_chip_of_another_group_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = existing(tmp_path, {**OTHER, "devices": "cpu:1"})
    with pytest.raises(InvalidArgument, match="cpu:1 occurs twice"):
        check_output(file, TUNED, name="b")


def test_a_running_group_that_the_file_does_not_have_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no group 'b'"):
        check_output(existing(tmp_path, OTHER), None, name="b")


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="cannot be written"):
        check_output(tmp_path / "none" / "groups.json", TUNED, name="b")


def test_a_file_that_is_no_groups_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(InvalidArgument, match="--groups-file"):
        check_output(file, TUNED, name="b")
