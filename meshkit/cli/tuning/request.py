"""What `chipmesh tune` was asked for, from its flags; checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.cli.backend_options import read_backend_options
from meshkit.cli.options import GroupOptions, MeshOptions
from meshkit.cli.tools import plugin_options
from meshkit.cli.tuning.groups_file import check_output
from meshkit.cli.tuning.objective import Objective, parse_objective
from meshkit.cli.tuning.space import Axes, make_axis
from meshkit.cli.tuning.taken_group import TakenGroup
from meshkit.cli.up import read_groups
from meshkit.config import parse_config
from meshkit.errors import InvalidArgument
from meshkit.load.command import read_settings
from meshkit.load.plot import check_plot
from meshkit.load.settings import BenchSettings
from meshkit.modelstore import default_cache_dir

WINDOWS_S = (0.0, 0.02, 0.05)
"""Tried where none are given."""
FIXED = "none"
"""The word for a setting that stays as it is."""
OWN_MESH = "a mesh of its own"
"""The load's gateway, before there is one."""
LONGEST_WINDOW_S = 1.0

_LOAD_FLAGS: Mapping[str, Any] = {
    "backend": "grpc", "base_url": None, "extra_body": None, "ignore_eos": True, "temperature": 0.0,
    "tokenizer": None, "vocab_size": None,
}  # fmt: skip
"""Flags of `bench serve` that tune does not have, or means otherwise."""


@dataclass(frozen=True)
class OwnGroup:
    """The group of a mesh that is started for the search."""

    group: GroupOptions
    options: MeshOptions


@dataclass(frozen=True)
class Tried:
    """Values from the flags. None: choose them; empty: none."""

    chunks: tuple[int, ...] | None
    batches: tuple[int, ...] | None
    windows_s: tuple[float, ...] | None


@dataclass(frozen=True)
class TuneRequest:
    """own: None: the group of a mesh that runs. keep: a running group goes on with what was found."""

    name: str
    own: OwnGroup | None
    load: BenchSettings
    objective: Objective
    tried: Tried
    budget_s: float
    rounds: int
    output: Path | None
    plot: Path | None
    keep: bool


def read_request(flags: Mapping[str, Any]) -> TuneRequest:
    """flags: by typer's names.

    Raises:
        InvalidArgument: a flag, or two that do not go together.
        FailedPrecondition: a plot or an output that cannot be written; no mesh is up, and none is to be.
    """
    own = _read_own(flags)
    name = flags["group"] or ("default" if own is not None else "")
    if not name:
        raise InvalidArgument(
            "--group is not given: name a group of the mesh that runs, or have one started with --model-path",
            field="--group",
        )
    load = _read_load(flags, own)
    tried = _read_tried(flags)
    if own is None and tried.windows_s:
        raise InvalidArgument(
            "--try-step-window: a running group keeps its window; tune on a mesh of its own (--model-path)",
            field="--try-step-window",
        )
    if flags["output"] is not None:
        check_output(flags["output"], own.group if own is not None else None, name=name)
    if flags["plot"] is not None:
        check_plot(flags["plot"])
    return TuneRequest(
        name=name,
        own=own,
        load=load,
        objective=parse_objective(flags["objective"], bounds=load.goodput),
        tried=tried,
        budget_s=flags["budget"],
        rounds=flags["rounds"],
        output=flags["output"],
        plot=flags["plot"],
        keep=flags["keep"],
    )


def make_axes(
    tried: Tried, load: BenchSettings, group: TakenGroup, *, can_grow: bool, has_windows: bool
) -> Axes:
    """The grid around what the group has. can_grow: beyond what its replicas take, too."""
    clients = _most_at_once(load)
    prompt = {
        "random": load.random_input_len,
        "shared-prefix": load.shared_prefix_len + load.random_input_len,
    }.get(load.dataset_name)
    windows = (None, *sorted(WINDOWS_S if tried.windows_s is None else tried.windows_s))
    return Axes(
        chunked_prefill_size=_axis(
            tried.chunks,
            group.effective.chunk_tokens,
            most=None if can_grow else group.capacity.chunk_tokens,
            enough=clients * prompt if clients is not None and prompt is not None else None,
        ),
        max_running_requests=_axis(
            tried.batches,
            group.effective.max_running_requests,
            most=None if can_grow else group.capacity.max_running_requests,
            enough=clients,
        ),
        step_window_s=windows if has_windows else (None,),
    )


def _axis(
    given: tuple[int, ...] | None, default: int, *, most: int | None, enough: int | None
) -> tuple[int | None, ...]:
    if given == ():
        return (None,)
    return make_axis(default, given=given or (), most=most, enough=enough)


def _most_at_once(load: BenchSettings) -> int | None:
    """Requests that the load has under way at once; None where nothing bounds them."""
    is_closed = load.request_rate is None and load.dataset_name != "trace"
    return load.concurrency if is_closed else load.max_concurrency


def _read_own(flags: Mapping[str, Any]) -> OwnGroup | None:
    if not flags["model_path"] and flags["groups_file"] is None:
        return None
    group = _read_entry(flags) if flags["groups_file"] is not None else _make_entry(flags)
    options = {
        "model_path": flags["model_path"],
        "groups": (group,),
        "start_timeout_s": flags["start_timeout"],
        "cache_dir": default_cache_dir(),
    }
    return OwnGroup(group, parse_config(MeshOptions, options, source="chipmesh tune"))


def _read_entry(flags: Mapping[str, Any]) -> GroupOptions:
    groups = {group.name: group for group in read_groups(flags["groups_file"])}
    name = flags["group"] or (next(iter(groups)) if len(groups) == 1 else "")
    if name not in groups:
        raise InvalidArgument(
            f"--group is {name!r}; --groups-file has {', '.join(groups)}: name one of them", field="--group"
        )
    return groups[name]


def _make_entry(flags: Mapping[str, Any]) -> GroupOptions:
    """A group with what the flags say."""
    model = Path(flags["model_path"])
    words = plugin_options(flags["backend_option"], emulate=flags["emulate"])
    given = {name: flags[name] for name in GroupOptions.model_fields if flags.get(name) is not None}
    entry = {
        **given,
        "name": flags["group"] or "default",
        "devices": flags["device_groups"] or f"{flags['backend']}:{flags['device']}",
        # The file that is written may lie elsewhere.
        "model_path": str(model.absolute()) if model.exists() else flags["model_path"],
        "backend_options": read_backend_options(words, flag="--backend-option") or None,
    }
    return parse_config(GroupOptions, entry, source="chipmesh tune")


def _read_load(flags: Mapping[str, Any], own: OwnGroup | None) -> BenchSettings:
    known = {name: value for name, value in flags.items() if name in BenchSettings.model_fields}
    gateway = OWN_MESH if own is not None else flags["gateway"]
    chosen = {**known, **_LOAD_FLAGS, "gateway": gateway}
    return read_settings(chosen, api_key_env=None, source="chipmesh tune")


def _read_tried(flags: Mapping[str, Any]) -> Tried:
    chunks = _numbers(flags["try_chunked_prefill_size"], flag="--try-chunked-prefill-size", least=1)
    batches = _numbers(flags["try_max_running_requests"], flag="--try-max-running-requests", least=1)
    windows_s = _numbers(
        flags["try_step_window"], flag="--try-step-window", least=0, most=LONGEST_WINDOW_S, whole=False
    )
    return Tried(
        None if chunks is None else tuple(int(value) for value in chunks),
        None if batches is None else tuple(int(value) for value in batches),
        windows_s,
    )


def _numbers(
    text: str | None, *, flag: str, least: float, most: float = 2**31, whole: bool = True
) -> tuple[float, ...] | None:
    """From "64,128"; nothing from `none`."""
    if text is None:
        return None
    if text.strip() == FIXED:
        return ()
    try:
        values = {float(int(word)) if whole else float(word) for word in text.split(",")}
    except ValueError:
        values = set()
    if not values or not all(least <= value <= most for value in values):
        kind = "whole numbers" if whole else "seconds"
        raise InvalidArgument(
            f"{flag} is {text!r}; {kind} from {least:g} to {most:g}, split by commas, or {FIXED!r}",
            field=flag,
        )
    return tuple(sorted(values))
