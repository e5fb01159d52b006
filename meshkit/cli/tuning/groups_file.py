"""What was found, as a groups file that `chipmesh up` takes: a new one, or a group of one that is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshkit.cli.device_groups import parse_device_groups
from meshkit.cli.options import GroupOptions
from meshkit.cli.tuning.space import Setting
from meshkit.cli.up import read_groups
from meshkit.errors import FailedPrecondition, InvalidArgument

FLAG = "--output"


def check_output(file: Path, group: GroupOptions | None, *, name: str) -> None:
    """Before minutes are spent: whether the group can be written there.

    group: its entry; None where only an entry that is there can be changed, since nobody knows its devices.

    Raises:
        InvalidArgument: the file is no groups file, lacks the group, or would give one chip to two groups.
        FailedPrecondition: its folder is not there or cannot be written.
    """
    if file.exists():
        present = {each.name: each for each in read_groups(file)}
    else:
        present = {}
        if not os.access(file.absolute().parent, os.W_OK):
            raise FailedPrecondition(f"{FLAG}: {file} cannot be written: no such folder, or it is not yours")
    if group is not None:
        present[name] = group
    elif name not in present:
        raise InvalidArgument(
            f"{FLAG}: {file} has no group {name!r}; name the groups file that the mesh was started with, or "
            "tune on a mesh of its own (--model-path)",
            field=FLAG,
        )
    parse_device_groups(";".join(each.devices for each in present.values()))


def write_group(file: Path, setting: Setting, *, name: str, group: GroupOptions | None) -> None:
    """Put `setting` into the group `name` of `file`; other groups and fields stay. What the setting leaves as
    it was stays so. The file is replaced in one step.

    group: the entry that was tuned, which goes over the present one; None: as the present one.

    Raises:
        FailedPrecondition: it cannot be written.
    """
    content: dict[str, Any] = {"groups": []}
    if file.exists():
        content = json.loads(file.read_text(encoding="utf-8"))
    entry = next((each for each in content["groups"] if each["name"] == name), None)
    if entry is None:
        entry = {}
        content["groups"].append(entry)
    entry.update(_entry(group) if group is not None else {})
    entry.update({key: value for key, value in asdict(setting).items() if value is not None})
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        raise FailedPrecondition(f"{FLAG}: {file} cannot be written: {error.strerror}") from error


def _entry(group: GroupOptions) -> Mapping[str, Any]:
    """What was given for it."""
    return group.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
