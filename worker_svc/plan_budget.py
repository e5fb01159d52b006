"""What `chipmesh plan --device-groups` works out: for each replica its layout and every rank's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshkit.cli.device_groups import Device, DeviceGroup
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError
from meshkit.modelstore.checkpoint_quantization import check_asked, read_quantization
from meshkit.modelstore.sharding import ParallelLayout
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.planning import ExecutionPlan, PlanRequest, plan_execution
from plugins.sdk.step_program import DecoderShape
from worker_svc.kv_sizing import DeviceMemory, KvRequest
from worker_svc.layout import ChipFacts, choose_layout
from worker_svc.memory_budget import Need, SetBudget, budget_set
from worker_svc.memory_parts import ModelForm, StepSizes

DEFAULT_CHUNK_TOKENS = 2048
"""The scheduler's, where neither chip nor flags say one; worker_svc does not import it."""


@dataclass(frozen=True)
class PlannedChip:
    """A chip of a replica: what it reports. modelled: it is described in a file."""

    device: Device
    facts: ChipFacts
    memory: DeviceMemory
    report: CapabilityReport
    modelled: bool = False


@dataclass(frozen=True)
class LayoutWishes:
    """What was asked of layouts; None: free. host_devices: chips of a machine; None: all."""

    tensor: int | None = None
    pipeline: int | None = None
    host_devices: int | None = None


@dataclass(frozen=True)
class PlannedModel:
    """What is planned for. shape: the model's, where it is of a pattern of step programs. program_bytes: its
    weights as a program holds them, by the encodings that the program takes.
    """

    config: Mapping[str, Any]
    shape: DecoderShape | None = None
    program_bytes: Callable[[Sequence[str]], int] | None = None


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica. reason: of its layout. refusal: why it would not run; then there is no budget."""

    chips: Sequence[PlannedChip]
    reason: str = ""
    budget: SetBudget | None = None
    refusal: MeshError | None = None


@dataclass(frozen=True)
class GroupPlan:
    """A group of `--device-groups`."""

    name: str
    replicas: Sequence[ReplicaPlan]


def plan_groups(
    groups: Sequence[DeviceGroup],
    find_chip: Callable[[Device], PlannedChip],
    model: PlannedModel,
    *,
    request: PlanRequest,
    kv: KvRequest,
    wishes: LayoutWishes,
) -> list[GroupPlan]:
    """All groups. A replica that would not run carries its refusal; the others are planned all the same.

    Raises:
        MeshError: what `find_chip` raises; (quantization) as `check_asked`.
    """
    chips = {device: find_chip(device) for group in groups for device in group.devices}
    kv = replace(kv, executors_on_host=max(sum(chip.memory.shared_with_host for chip in chips.values()), 1))

    def planned(devices: Sequence[Device]) -> ReplicaPlan:
        replica = [chips[device] for device in devices]
        try:
            return plan_replica(replica, model, request=request, kv=kv, wishes=wishes)
        except MeshError as error:
            return ReplicaPlan(replica, refusal=error)

    return [GroupPlan(group.name, [planned(each) for each in group.replicas]) for group in groups]


def plan_replica(
    chips: Sequence[PlannedChip],
    model: PlannedModel,
    *,
    request: PlanRequest,
    kv: KvRequest,
    wishes: LayoutWishes,
) -> ReplicaPlan:
    """One replica over all of `chips`.

    Raises:
        InvalidArgument, FailedPrecondition: settings or sizes that these chips or this model cannot have.
        ResourceExhausted: as worker_svc.memory_budget.budget_set.
    """
    settings = _settings(chips, model, replace(request, ranks=len(chips)))
    need = _need(chips[0], model, settings, request=request, kv=kv)
    memories = [chip.memory for chip in chips]
    budgets: dict[ParallelLayout, SetBudget] = {}

    def fits(layout: ParallelLayout) -> None:
        budgets[layout] = budget_set(need, layout, memories)

    alone = len(chips) == 1
    layout, reason = choose_layout(
        model.config,
        _hosts(chips, wishes.host_devices),
        # A replica of one chip takes no notice of them, as in `up`.
        tensor=None if alone else wishes.tensor,
        pipeline=None if alone else wishes.pipeline,
        fits=fits,
    )
    return ReplicaPlan(chips, reason=reason, budget=budgets[layout])


def _settings(chips: Sequence[PlannedChip], model: PlannedModel, request: PlanRequest) -> ExecutionPlan:
    """What the first chip's report decides, if the others can do it, too."""
    checkpoint = read_quantization(model.config)
    check_asked(request.quantization, checkpoint)
    if checkpoint is not None:
        request = replace(request, quantization=checkpoint.scheme.kind, stored_as=checkpoint.label)
    settings = plan_execution(chips[0].report, [], request, shape=model.shape)
    for chip in chips:
        if settings.dtype.value not in chip.report.compute_dtypes:
            raise InvalidArgument(
                f"dtype is {settings.dtype.value!r}, which {chip.device} of this replica does not have; it "
                f"has {', '.join(chip.report.compute_dtypes)}. Choose one that all of its chips have",
                field="dtype",
                reason="DTYPE_UNSUPPORTED",
            )
    if len(chips) > 1 and not (chips[0].modelled or chips[0].report.collectives):
        raise FailedPrecondition(
            f"chip {chips[0].report.chip!r} reports no collectives, so no replica can be split over several; "
            "join none by '+'",
            field="device_groups",
            reason="NO_COLLECTIVES",
        )
    return settings


def _need(
    chip: PlannedChip, model: PlannedModel, settings: ExecutionPlan, *, request: PlanRequest, kv: KvRequest
) -> Need:
    chunk = settings.chunk_tokens.value or DEFAULT_CHUNK_TOKENS
    context: int = model.config["max_position_embeddings"]
    program = next(
        (each for each in chip.report.step_programs if each.pattern == settings.step_program.value), None
    )
    return Need(
        config=model.config,
        form=ModelForm(
            dtype=settings.dtype.value,
            kv_cache_dtype=settings.kv_cache_dtype.value,
            quantization=request.quantization,
            checkpoint=read_quantization(model.config),
        ),
        steps=StepSizes(
            # Without chunking (-1) a step takes a whole prompt.
            chunk_tokens=min(chunk, context) if chunk > 0 else context,
            window=settings.max_running_requests.value,
            captures_graphs=settings.graph_capture.value,
        ),
        page_size=settings.page_size.value,
        request=replace(kv, page_size=settings.page_size.value),
        program_bytes=model.program_bytes(program.encodings) if program and model.program_bytes else None,
    )


def _hosts(chips: Sequence[PlannedChip], host_devices: int | None) -> list[list[ChipFacts]]:
    """Neighbours of one machine; devices are numbered from machine to machine."""
    hosts: list[list[ChipFacts]] = []
    last = None
    for chip in chips:
        host = chip.device.index // host_devices if host_devices else 0
        if host != last:
            hosts.append([])
        hosts[-1].append(chip.facts)
        last = host
    return hosts
