"""The layout of a worker's set: as configured, else chosen by the model and the chips."""

from __future__ import annotations

from collections.abc import Sequence

from chipmesh.device.v1alpha1.device_pb2 import DeviceProperties
from chipmesh.device.v1alpha1.plugin_pb2 import CapabilityReport
from meshkit.modelstore import default_cache_dir, open_model
from meshkit.modelstore.sharding import ParallelLayout
from meshkit.telemetry.logging import get_logger
from worker_svc.config import WorkerConfig
from worker_svc.layout import choose_layout, read_chip

log = get_logger(__name__)


def layout_of(
    config: WorkerConfig, chips: Sequence[tuple[CapabilityReport, DeviceProperties]]
) -> ParallelLayout:
    """The layout of all ranks. Reads the model's configuration where the sizes are not given.

    chips: what this host's executors report, by rank.

    Raises:
        InvalidArgument: no layout over so many chips divides the model, or it cannot be read.
    """
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
    if not config.is_set:
        return ParallelLayout()
    count = len(config.own_devices)
    if tensor is not None or pipeline is not None:
        # Of several hosts' ranks both are given; on one host the other is what is left.
        return ParallelLayout(tensor or count // (pipeline or 1), pipeline or count // (tensor or 1))
    if not config.model_path:
        return ParallelLayout(tensor=count)  # Nothing is split that has no weights.
    model = open_model(
        config.model_path,
        cache_dir=config.cache_dir or default_cache_dir(),
        need_weights=False,
        need_tokenizer=False,
    )
    layout, reason = choose_layout(model.config, [[read_chip(*chip) for chip in chips]])
    log.info("layout", tensor=layout.tensor, pipeline=layout.pipeline, reason=reason)
    return layout
