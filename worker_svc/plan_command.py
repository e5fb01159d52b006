"""Behind `chipmesh plan`: how a model would run on chips, and what fits. Reads no weights, starts no mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshkit.cli.backend_options import options_for, read_backend_options
from meshkit.cli.device_groups import Device, DeviceGroup, parse_device_groups
from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_json
from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from meshkit.modelstore.sharding import ALONE, RankPlace
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.planning import Choice, ExecutionPlan, PlanRequest, plan_execution
from plugins.sdk.registry import load_backend
from plugins.sdk.runner import OperatorDecision
from worker_svc.kv_sizing import DeviceMemory, KvRequest
from worker_svc.layout import read_chip
from worker_svc.memory_parts import program_weight_bytes
from worker_svc.modelled_chips import ModelledChips, read_modelled_chips
from worker_svc.plan_budget import GroupPlan, LayoutWishes, PlannedChip, PlannedModel, plan_groups
from worker_svc.plan_tables import groups_to_json, print_groups

_FLAGS = {
    "model_path": "--model",
    "chunk_tokens": "--chunked-prefill-size",
    "tensor_parallel_size": "--tp-size",
    "pipeline_parallel_size": "--pp-size",
}
"""Where a flag is not called as its field."""
_COLUMNS = ("operator", "where", "calls", "sizes", "choice", "reason")


@dataclass(frozen=True)
class PlanWishes:
    """The flags of `chipmesh plan`. device_groups, backend: at least one of them is given. chips: a file."""

    model: str
    request: PlanRequest
    backend: str = ""
    device_groups: str = ""
    chips: Path | None = None
    kv: KvRequest = field(default_factory=KvRequest)
    layout: LayoutWishes = field(default_factory=LayoutWishes)


@dataclass(frozen=True)
class Planned:
    """What came of them. operators: by back end."""

    operators: Mapping[str, ExecutionPlan]
    groups: Sequence[GroupPlan] = ()

    @property
    def is_refused(self) -> bool:
        """Whether any replica would not run."""
        return any(replica.refusal for group in self.groups for replica in group.replicas)


def main(
    *,
    model: str,
    backend: str,
    device_groups: str,
    chips: Path | None,
    options: Sequence[str],
    request: dict[str, Any],
    kv: dict[str, Any],
    layout: dict[str, Any],
    as_json: bool,
) -> int:
    """Plan, print, and return the exit code: 1 where a replica would not run.

    Raises:
        InvalidArgument: (--model, --backend, --option and the flags of `request`) a wrong command line.
        MeshError: the back end does not start, or refuses the model; the cause is named.
    """
    wishes = PlanWishes(
        model, PlanRequest(**request), backend, device_groups, chips, KvRequest(**kv), LayoutWishes(**layout)
    )
    given = read_backend_options(options, flag="--option")
    start = cache(lambda name: load_backend(name, options_for(name, given)))
    try:
        planned = make_plans(wishes, start)
    except InvalidArgument as error:
        raise _about_a_flag(error) from error
    if as_json:
        print_json(_to_json(planned, wishes))
    else:
        _print_all(planned, model, Console(highlight=False))
    return EXIT_FAILED if planned.is_refused else EXIT_OK


def make_plans(wishes: PlanWishes, start: Callable[[str], Backend]) -> Planned:
    """Operators of the back end that was named, memory of the groups that were, and operators of theirs.

    start: gives a back end by name, each time the same.

    Raises:
        InvalidArgument: neither is named, or what is cannot be had.
        MeshError: as `main`.
    """
    fraction = wishes.kv.mem_fraction_static
    if fraction is not None and not 0 < fraction <= 1:
        raise InvalidArgument(
            f"mem_fraction_static is {fraction:g}; its range is (0, 1]", field="mem_fraction_static"
        )
    if not wishes.device_groups:
        if not wishes.backend:
            raise InvalidArgument(
                "name a plugin by --backend, chips by --device-groups, or both", field="backend"
            )
        if wishes.chips is not None:
            raise InvalidArgument("a file of chips goes with --device-groups", field="chips")
        plan = make_plan(start(wishes.backend), wishes.model, wishes.request)
        return Planned({wishes.backend: plan})
    modelled = read_modelled_chips(wishes.chips) if wishes.chips is not None else None
    devices = parse_device_groups(wishes.device_groups)
    backends = [] if modelled else sorted({each.backend for group in devices for each in group.devices})
    groups = _plan_memory(devices, modelled, wishes, start)
    named = [wishes.backend] if wishes.backend and wishes.backend not in backends else []
    plans = {
        name: make_plan(start(name), wishes.model, wishes.request, place=_place_of(name, groups))
        for name in (*named, *backends)
    }
    return Planned(plans, groups)


def _plan_memory(
    devices: Sequence[DeviceGroup],
    modelled: ModelledChips | None,
    wishes: PlanWishes,
    start: Callable[[str], Backend],
) -> list[GroupPlan]:
    def find(device: Device) -> PlannedChip:
        return _modelled_chip(modelled, device) if modelled else _real_chip(start(device.backend), device)

    folder = _open(wishes.model)
    return plan_groups(
        devices,
        find,
        PlannedModel(folder.config) if modelled else _with_programs(folder),
        request=wishes.request,
        kv=wishes.kv,
        wishes=wishes.layout,
    )


def _modelled_chip(chips: ModelledChips, device: Device) -> PlannedChip:
    chip = chips.find(device.backend, device.index)
    report = chip.report(device.backend)
    free = chip.memory_total_bytes if chip.memory_free_bytes is None else chip.memory_free_bytes
    memory = DeviceMemory(chip.memory_total_bytes, free, shared_with_host=False)
    facts = read_chip(report, _Memory(device.index, memory.total_bytes, memory.free_bytes))
    return PlannedChip(device, facts, memory, report, modelled=True)


def _real_chip(backend: Backend, device: Device) -> PlannedChip:
    if backend.create_runner(RunnerContext(device=device.index)) is not None:
        raise FailedPrecondition(
            f"plugin {device.backend!r} brings a runner of its own, whose memory the framework does not plan",
            field="device_groups",
        )
    report, properties = backend.capabilities(), backend.devices.properties(device.index)
    memory = DeviceMemory(
        properties.memory_total_bytes, properties.memory_free_bytes, backend.devices.shares_host_memory
    )
    return PlannedChip(device, read_chip(report, properties), memory, report)


@dataclass(frozen=True)
class _Memory:
    """A modelled chip's, as a device's properties have it."""

    index: int
    memory_total_bytes: int
    memory_free_bytes: int


def _with_programs(folder: ModelFolder) -> PlannedModel:
    """The model as step programs would be given it, its weights as they are stored."""
    # Only here, since they import the tensor framework: modelled chips need none.
    from worker_svc.models.registry import find_architecture  # noqa: PLC0415
    from worker_svc.program_runs import describe_shape  # noqa: PLC0415

    architecture, _ = find_architecture(folder.config)

    def program_bytes(encodings: Iterable[str]) -> int:
        return program_weight_bytes(folder.config, partial(_encoding_of, folder), taken=frozenset(encodings))

    shape = describe_shape(architecture, folder.config, vocab_size=folder.vocab_size)
    return PlannedModel(folder.config, shape, program_bytes)


def _open(reference: str) -> ModelFolder:
    """With the index of its weights, whose values are not read; without where there are none."""
    try:
        return open_model(reference, cache_dir=default_cache_dir(), need_tokenizer=False)
    except InvalidArgument as error:
        if error.reason != "WEIGHTS_MISSING":
            raise
    return open_model(reference, cache_dir=default_cache_dir(), need_weights=False, need_tokenizer=False)


def _encoding_of(folder: ModelFolder, name: str) -> str:
    """How a tensor is stored. A folder without weights is taken for load-format dummy: all in float32."""
    return folder.weights.tensors[name].encoding if folder.weights is not None else "F32"


def _place_of(backend: str, groups: Sequence[GroupPlan]) -> RankPlace:
    """Rank 0 of the first replica on that back end: whose operators are shown."""
    for group in groups:
        for replica in group.replicas:
            if replica.budget is not None and replica.chips[0].device.backend == backend:
                return replica.budget.layout.place(0)
    return ALONE


def _to_json(planned: Planned, wishes: PlanWishes) -> dict[str, Any]:
    plans = {
        name: {**plan.to_json(), "counts": count_choices(plan)} for name, plan in planned.operators.items()
    }
    if not wishes.device_groups:
        return {"model": wishes.model, "backend": wishes.backend, **plans[wishes.backend]}
    return {"model": wishes.model, "groups": groups_to_json(planned.groups), "operators_of": plans}


def _print_all(planned: Planned, model: str, console: Console) -> None:
    print_groups(planned.groups, model, console)
    for plan in planned.operators.values():
        print_plan(plan, model, console)


def _about_a_flag(error: InvalidArgument) -> InvalidArgument:
    """The same error about what was typed: a wrong command line has an exit code of its own."""
    field = error.field or ""
    if field.startswith("--"):
        return error  # which names its flag
    if field.startswith("backend_options."):
        flag = "--emulate" if field.endswith(".emulate") else "--option"
    else:
        flag = _FLAGS.get(field, f"--{field.replace('_', '-')}")
    return InvalidArgument(f"{flag}: {error.message}", field=flag, reason=error.reason, **error.metadata)


def make_plan(
    backend: Backend, model: str, request: PlanRequest, *, place: RankPlace = ALONE
) -> ExecutionPlan:
    """The plan of a back end, of one rank's operators; without any where it brings a runner of its own.

    Raises:
        MeshError: as plugins.sdk.planning.plan_execution, and for a model that cannot be read.
    """
    report = backend.capabilities()
    if backend.create_runner(RunnerContext()) is not None:
        return plan_execution(report, [], request)
    # Only here, since they import the tensor framework: a plugin with a runner of its own needs none.
    from worker_svc.call_sites import collect_call_sites  # noqa: PLC0415
    from worker_svc.layers.quantization import QuantizationPolicy  # noqa: PLC0415
    from worker_svc.models.registry import find_architecture  # noqa: PLC0415
    from worker_svc.program_runs import describe_shape  # noqa: PLC0415

    folder = open_model(model, cache_dir=default_cache_dir(), need_weights=False, need_tokenizer=False)
    policy = QuantizationPolicy.of_model(request.quantization, folder.config)
    stored_as = policy.checkpoint.label if policy.checkpoint else ""
    request = replace(request, quantization=policy.kind, stored_as=stored_as, ranks=place.layout.world_size)
    sites = collect_call_sites(folder.config, vocab_size=folder.vocab_size, policy=policy, place=place)
    architecture, _ = find_architecture(folder.config)
    shape = describe_shape(architecture, folder.config, vocab_size=folder.vocab_size)
    return plan_execution(report, sites, request, shape=shape)


def count_choices(plan: ExecutionPlan) -> dict[str, int]:
    """Operator calls of a forward pass by how they run."""
    counts: dict[str, int] = {}
    for decision in plan.served_by():
        counts[decision.choice] = counts.get(decision.choice, 0) + decision.calls
    return counts


def print_plan(plan: ExecutionPlan, model: str, console: Console) -> None:
    """Settings, then operators, for a person."""
    emulated = " (emulated)" if plan.emulated else ""
    settings = Table(title=f"{model} on {plan.chip}{emulated}")
    for column in ("setting", "value", "reason"):
        settings.add_column(column)
    for name, choice in vars(plan).items():
        if isinstance(choice, Choice):
            value = "none" if choice.value in ("", None) else str(choice.value)
            settings.add_row(name, value, choice.reason)
    console.print(settings)
    if not plan.operators:
        console.print("operators: the plugin brings a runner of its own, which the framework does not plan")
        return
    operators = Table(title="operators")
    for column in _COLUMNS:
        operators.add_column(column, overflow="fold")
    for decision in plan.served_by():
        operators.add_row(*_row(decision))
    console.print(operators)


def _row(decision: OperatorDecision) -> tuple[str, ...]:
    sizes = " ".join(f"{symbol}={size}" for symbol, size in decision.sizes.items())
    where = decision.where.replace("model.", "")
    return decision.name, where, str(decision.calls), sizes, decision.choice, decision.reason
