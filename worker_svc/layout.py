"""Which layout a set of chips gets: tensor parallel inside a machine, pipeline parallel across machines.

Pure: what chips report in, a layout and its reason out. No clock, no file, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import gcd, prod
from typing import Any, Protocol

from meshkit.errors import InvalidArgument, ResourceExhausted
from meshkit.modelstore import tensor_shapes
from meshkit.modelstore.sharding import ParallelLayout, check_layout
from plugins.sdk.tensors import dtype_size

REFERENCE_FLOPS = 1e14
"""Operations a second that a chip is taken to do in prompt steps: about what data-centre chips of 2020 to
2023 keep up in bfloat16. Reports say nothing of it.
"""


@dataclass(frozen=True)
class ChipFacts:
    """What a chip reports, by the report's own names. Bytes; 0: unknown.

    device: its index as its plugin counts. links: bytes a second to other devices, by index; missing or 0:
    unknown.
    """

    memory_total_bytes: int = 0
    memory_free_bytes: int = 0
    device: int = 0
    chip: str = ""
    compute_dtypes: Sequence[str] = ("float32",)
    links: Mapping[int, int] = field(default_factory=dict)


class _Link(Protocol):
    @property
    def peer_device(self) -> int: ...
    @property
    def bandwidth_bytes_per_second(self) -> int: ...


class _Report(Protocol):
    @property
    def chip(self) -> str: ...
    @property
    def compute_dtypes(self) -> Iterable[str]: ...
    @property
    def links(self) -> Iterable[_Link]: ...


class _Device(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def memory_total_bytes(self) -> int: ...
    @property
    def memory_free_bytes(self) -> int: ...


def read_chip(report: _Report, device: _Device) -> ChipFacts:
    """The facts in a capability report and a device's properties: the SDK's classes or their messages."""
    return ChipFacts(
        memory_total_bytes=device.memory_total_bytes,
        memory_free_bytes=device.memory_free_bytes,
        device=device.index,
        chip=report.chip,
        compute_dtypes=tuple(report.compute_dtypes),
        links={link.peer_device: link.bandwidth_bytes_per_second for link in report.links},
    )


def choose_layout(
    config: Mapping[str, Any],
    hosts: Sequence[Sequence[ChipFacts]],
    *,
    tensor: int | None = None,
    pipeline: int | None = None,
    fits: Callable[[ParallelLayout], object] | None = None,
) -> tuple[ParallelLayout, str]:
    """A layout over all chips of `hosts`, and why it is this one. Ranks take the chips in order.

    config: completed. tensor, pipeline: sizes that were asked for; None: free. fits: raises ResourceExhausted
    for a layout that does not fit; None: memory is not looked at.

    The most tensor ranks that divide the model and every machine's chips, so that each layer's sums stay
    inside a machine; stages for the rest. Where a tensor group has a link that is known to be slower than
    `least_bandwidth`, fewer tensor ranks and more stages. A layout that does not fit gives way to the next.

    Raises:
        InvalidArgument: (tensor_ or pipeline_parallel_size) sizes asked for that do not make up the chips or
            do not divide the model; (device_groups) no layout over so many chips does.
        ResourceExhausted: of the first choice, where none fits.
    """
    counts = [len(host) for host in hosts]
    world = sum(counts)
    if tensor is not None or pipeline is not None:
        asked = _asked(world, tensor, pipeline)
        check_layout(config, asked)
        if fits is not None:
            fits(asked)
        return asked, _in_words("as asked", hosts)
    candidates = [each for each in layouts_of(config, world) if reduce(gcd, counts) % each.tensor == 0]
    if not candidates:
        raise _no_layout(config, counts)
    ordered = _by_links(config, hosts, candidates)
    layout, reason = _first_that_fits(ordered, fits)
    return layout, _in_words(reason, hosts)


def layouts_of(config: Mapping[str, Any], count: int) -> Iterator[ParallelLayout]:
    """Layouts of `count` ranks that divide the model; most tensor ranks first."""
    for tensor in range(count, 0, -1):
        if count % tensor:
            continue
        layout = ParallelLayout(tensor, count // tensor)
        try:
            check_layout(config, layout)
        except InvalidArgument:
            continue
        yield layout


def least_bandwidth(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes a second below which a link makes tensor parallel slower than pipeline parallel.

    For t tokens and n ranks a layer sums two tensors [t, hidden], for which each rank sends and gets
    2 (n - 1) / n of their bytes (a ring's all-reduce): 4 (n - 1) / n * t * hidden * b. What that buys is a
    layer's computing, 2 * t * P operations for its P weights (of experts those chosen), in 1 / n of the time.
    The sums take longer than the (n - 1) / n that is saved where the link is slower than
    2 * hidden * b * REFERENCE_FLOPS / P, whatever n and t are. A pipeline's sums are none.
    """
    traffic = 2 * int(config["hidden_size"]) * dtype_size(dtype)
    return int(traffic * REFERENCE_FLOPS / _weights_of_a_layer(config))


def describe_layout(layout: ParallelLayout) -> str:
    """In words, by the flags' names."""
    return f"tensor_parallel_size {layout.tensor} x pipeline_parallel_size {layout.pipeline}"


def _asked(world: int, tensor: int | None, pipeline: int | None) -> ParallelLayout:
    """What was asked for; a size that is left out is the chips divided by the other one."""
    rest = max(world // (tensor or pipeline or 1), 1)
    layout = ParallelLayout(rest if tensor is None else tensor, rest if pipeline is None else pipeline)
    if layout.world_size != world:
        sizes = describe_layout(layout)
        raise InvalidArgument(
            f"{sizes} is {layout.world_size} ranks, and the replica has {world} chips; their product must be "
            "the number of chips",
            field="tensor_parallel_size" if tensor is not None else "pipeline_parallel_size",
            reason="LAYOUT_DOES_NOT_MATCH",
        )
    return layout


def _by_links(
    config: Mapping[str, Any], hosts: Sequence[Sequence[ChipFacts]], candidates: Sequence[ParallelLayout]
) -> list[tuple[ParallelLayout, str]]:
    """Those without slow links first, with reasons; among each kind most tensor ranks first."""
    chips = [chip for host in hosts for chip in host]
    bound = least_bandwidth(config, chips[0].compute_dtypes[0])
    good: list[tuple[ParallelLayout, str]] = []
    slow: list[tuple[ParallelLayout, str]] = []
    for layout in candidates:
        slowest = _slowest_link(chips, layout)
        if slowest is None or slowest >= bound:
            good.append((layout, slow[0][1] if slow else _plain_reason(layout, hosts)))
        else:
            said = (
                f"a link of {slowest / 1e9:.3g} GB/s is under the {bound / 1e9:.3g} GB/s from which on "
                f"{layout.tensor} tensor ranks pay"
            )
            slow.append((layout, said))
    forced = [(layout, f"{said}, but the model has too few layers for stages alone") for layout, said in slow]
    return good + forced


def _plain_reason(layout: ParallelLayout, hosts: Sequence[Sequence[ChipFacts]]) -> str:
    if layout.world_size == 1:
        return "one chip"
    if len(hosts) > 1:
        return f"tensor parallel inside a machine, pipeline parallel across the {len(hosts)} machines"
    if layout.pipeline > 1:
        return "the most tensor ranks that divide the model, stages for the rest"
    return "tensor parallel inside a machine"


def _slowest_link(chips: Sequence[ChipFacts], layout: ParallelLayout) -> int | None:
    """The slowest one that is known between two chips of a tensor group; None: none is known."""
    known: list[int] = []
    for first in range(0, len(chips), layout.tensor):
        group = chips[first : first + layout.tensor]
        known += [chip.links.get(peer.device, 0) for chip in group for peer in group if peer is not chip]
    return min((each for each in known if each), default=None)


def _first_that_fits(
    ordered: Sequence[tuple[ParallelLayout, str]], fits: Callable[[ParallelLayout], object] | None
) -> tuple[ParallelLayout, str]:
    refused: ResourceExhausted | None = None
    for layout, reason in ordered:
        try:
            if fits is not None:
                fits(layout)
        except ResourceExhausted as error:
            refused = refused or error
            continue
        if refused is not None:
            return layout, f"{describe_layout(ordered[0][0])} would not fit"
        return layout, reason
    assert refused is not None, "there is a candidate, and it was refused"
    raise refused


def _in_words(reason: str, hosts: Sequence[Sequence[ChipFacts]]) -> str:
    """The reason, and which chip decides where they are not alike."""
    memories = [chip.memory_total_bytes for host in hosts for chip in host if chip.memory_total_bytes]
    if len(set(memories)) > 1:
        reason += (
            f"; the smallest chip, {min(memories) / 1e9:.2f} of up to {max(memories) / 1e9:.2f} GB, decides "
            "how many tokens fit"
        )
    return reason


def _no_layout(config: Mapping[str, Any], counts: Sequence[int]) -> InvalidArgument:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    chips = " + ".join(map(str, counts))
    return InvalidArgument(
        f"no layout over {chips} chips divides the model: it has {heads} heads, "
        f"{config['num_key_value_heads']} key/value heads and {layers} layers, and at most a stage for each "
        "layer; take another number of chips",
        field="device_groups",
        reason="LAYOUT_DOES_NOT_DIVIDE",
    )


def _weights_of_a_layer(config: Mapping[str, Any]) -> int:
    """Weights that a token meets in a layer, on average over the layers."""
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 1)
    share = config.get("num_experts_per_tok", experts) / experts
    total = 0.0
    for name, shape in tensor_shapes(config).items():
        if name.startswith("model.layers."):
            total += prod(shape) * (share if ".experts." in name else 1)
    return int(total / config["num_hidden_layers"])
