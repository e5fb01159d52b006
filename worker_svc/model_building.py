"""From a model reference and a back end to a planned model that can be built, as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model
from meshkit.modelstore.checkpoint_quantization import read_quantization
from meshkit.modelstore.sharding import ALONE, ParallelLayout, RankPlace
from plugins.sdk.backend import Backend
from plugins.sdk.memory import Buffer
from plugins.sdk.operator_table import OperatorBinder, OperatorTable
from plugins.sdk.operators import OperatorSet
from plugins.sdk.planning import CallSite, ExecutionPlan, PlanRequest, plan_execution
from plugins.sdk.runner import LoadOptions, Progress
from plugins.sdk.step_program import DecoderShape, StepProgram, StepProgramCapability
from plugins.sdk.tensors import carrier_of
from worker_svc.call_sites import collect_call_sites
from worker_svc.kv_scales import KvScales, read_kv_scales
from worker_svc.layers.quantization import QuantizationPolicy
from worker_svc.models.architecture import KvShape, Model, ModelContext, ModelFactory
from worker_svc.models.registry import find_architecture
from worker_svc.parallel.links import NoLinks, RankLinks
from worker_svc.program_runs import DecoderReader, describe_shape
from worker_svc.weights import DummyWeights, QuantizedWeights, WeightReader, WeightSource
from worker_svc.weights.parts import RankWeights

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True)
class PlannedModel:
    """A model whose weights are not read yet, and how it runs on its back end.

    operators: what carries out the plan. device: where torch keeps its tensors. links: to the ranks that run
    the other parts; before they are joined they tell the place only.
    """

    backend: Backend
    folder: ModelFolder
    architecture: str
    factory: ModelFactory
    policy: QuantizationPolicy
    sites: Sequence[CallSite]
    plan: ExecutionPlan
    operators: OperatorTable
    source: WeightSource
    device: torch.device
    shape: DecoderShape | None = None
    links: RankLinks = field(default_factory=NoLinks)
    kv_scales: KvScales = field(default_factory=KvScales)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return getattr(torch, self.plan.dtype.value)  # type: ignore[no-any-return]

    @property
    def program(self) -> StepProgramCapability | None:
        """The plugin's program that the plan chose."""
        pattern = self.plan.step_program.value
        entries = self.backend.capabilities().step_programs
        return next((each for each in entries if each.pattern == pattern), None)

    def create_program(self, progress: Progress) -> StepProgram | None:
        """The plugin's program over the weights, where the plan says so."""
        entry, shape = self.program, self.shape
        if entry is None or shape is None:
            return None
        reader = DecoderReader(
            self.source,
            self.folder.config,
            encodings=entry.encodings,
            progress=partial(progress, "weights"),
        )
        quantization: str = self.plan.quantization.value
        return self.backend.execute_runnable(
            lambda: self.backend.create_step_program(shape, reader.read(), quantization=quantization)
        )

    def build(self, operators: OperatorBinder, progress: Progress) -> Model:
        """Read and place the weights. operators: `self.operators`, or what shows their calls to somebody."""
        context = ModelContext(
            config=self.folder.config,
            source=self.source,
            operators=operators,
            dtype=self.dtype,
            device=self.device,
            progress=partial(progress, "weights"),
            policy=self.policy,
            links=self.links,
            kv_scales=self.kv_scales,
        )
        return self.backend.execute_runnable(lambda: self.factory(context))


def plan_model(
    backend: Backend, options: LoadOptions, progress: Progress, *, page_size: int | None = None
) -> PlannedModel:
    """Open a model and decide how it runs. page_size: tokens; None: as the chip prefers.

    Raises:
        InvalidArgument: (load_format, model_path, dtype, kv_cache_dtype, quantization) what cannot be.
            (tensor_parallel_size, pipeline_parallel_size) the model does not divide so.
        FailedPrecondition: as plugins.sdk.planning.plan_execution; (backend) it has no operators.
        NotFound: no such device.
    """
    operators = require_operators(backend)
    backend.devices.properties(options.device)
    folder = open_folder(options, progress)
    policy = QuantizationPolicy.of_model(options.quantization, folder.config)
    architecture, factory = find_architecture(folder.config)
    place = place_of(options)
    sites = collect_call_sites(folder.config, vocab_size=folder.vocab_size, policy=policy, place=place)
    request = PlanRequest(
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        page_size=page_size,
        quantization=policy.kind,
        stored_as=policy.checkpoint.label if policy.checkpoint else "",
        strict=options.strict,
        ranks=place.layout.world_size,
    )
    shape = describe_shape(architecture, folder.config, vocab_size=folder.vocab_size)
    plan = plan_execution(backend.capabilities(), sites, request, shape=shape)
    return PlannedModel(
        backend=backend,
        folder=folder,
        architecture=architecture,
        factory=factory,
        policy=policy,
        sites=sites,
        plan=plan,
        operators=operators.table(plan.operators),
        source=_weights(folder, options.load_format, place),
        device=operators.torch_device(options.device),
        shape=shape,
        links=NoLinks(place),
        kv_scales=read_kv_scales(folder.config, folder.weights, plan.kv_cache_dtype.value),
    )


def place_of(options: LoadOptions) -> RankPlace:
    """Which part of the model is to be loaded. Raises InvalidArgument (…_parallel_size, rank)."""
    if options.parallel is None:
        return ALONE
    return ParallelLayout(options.parallel.tensor, options.parallel.pipeline).place(options.parallel.rank)


def require_operators(backend: Backend) -> OperatorSet:
    """The back end's operators. Raises FailedPrecondition (backend) where it has none."""
    if backend.operators is None:
        raise FailedPrecondition(
            f"plugin {backend.info().name!r} has neither operators nor a runner of its own", field="backend"
        )
    return backend.operators


def open_folder(options: LoadOptions, progress: Progress) -> ModelFolder:
    """The model's files. Raises InvalidArgument (load_format, model_path)."""
    if options.load_format not in LOAD_FORMATS:
        raise InvalidArgument(
            f"load_format is {options.load_format!r}; supported: {', '.join(LOAD_FORMATS)}",
            field="load_format",
        )
    folder = open_model(
        options.model_path,
        cache_dir=Path(options.cache_dir) if options.cache_dir else default_cache_dir(),
        progress=progress,
        need_weights=options.load_format != "dummy",
    )
    wanted = options.load_format
    if wanted in ("safetensors", "gguf") and folder.weights is not None:
        other = [file for file in folder.weights.files if file.suffix != f".{wanted}"]
        if other:
            raise InvalidArgument(
                f"load_format is {wanted!r}, but the weights of {options.model_path!r} are in "
                f"{other[0].name}; use auto",
                field="load_format",
            )
    return folder


def allocate_pages(
    backend: Backend, shape: KvShape, *, page_count: int, page_size: int, dtype: str, device: int
) -> tuple[Buffer, Sequence[Tensor]]:
    """A zeroed KV cache in the chip's order in memory, and its layers [2, pages, page, g, d] as views.

    Zeroed, since attention multiplies masked cells by 0, and NaN x 0 is NaN.
    """
    layout = require_operators(backend).kv_layout
    buffer = backend.memory.allocate(
        (shape.layers, *layout.memory_shape((2, page_count, page_size, shape.heads, shape.head_dim))),
        carrier_of(dtype),
        device,
        zeroed=True,
    )
    tensor: Tensor = buffer.tensor.view(getattr(torch, dtype))
    return buffer, [layout.as_cache(layer) for layer in tensor.unbind(0)]


def _weights(folder: ModelFolder, load_format: str, place: RankPlace) -> WeightSource:
    whole = _whole_weights(folder, load_format)
    return whole if place.layout.world_size == 1 else RankWeights(whole, folder.config, place)


def _whole_weights(folder: ModelFolder, load_format: str) -> WeightSource:
    if load_format == "dummy" or folder.weights is None:
        return DummyWeights(folder.config, seed=0)
    reader = WeightReader(folder.weights)
    quantization = read_quantization(folder.config)
    return QuantizedWeights(reader, folder.config, quantization) if quantization else reader
