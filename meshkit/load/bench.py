"""One measured run: target opened, workload made, load driven, figures put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshkit.load.arrivals import spread_arrivals
from meshkit.load.dataset import make_requests, make_warm_up
from meshkit.load.driver import OnDone, run_closed_loop, run_open_loop
from meshkit.load.figures import describe_samples
from meshkit.load.grpc_target import GrpcTarget
from meshkit.load.openai_target import OpenAiTarget
from meshkit.load.request import LoadRequest
from meshkit.load.sample import Sample
from meshkit.load.settings import PROMPTS_PER_CLIENT, BenchSettings, check_settings
from meshkit.load.targets import Target

OnStart = Callable[[int], None]


@dataclass(frozen=True)
class BenchRun:
    """report: settings, model and the figures of `describe_samples`. samples: one for each request."""

    report: dict[str, Any]
    samples: list[Sample]


async def run_bench(
    settings: BenchSettings, *, on_start: OnStart | None = None, on_done: OnDone | None = None
) -> BenchRun:
    """Measures one server. on_start gets the number of requests, on_done each sample as it is whole.

    Raises:
        MeshError: settings that do not fit the server or the files, a server that cannot be asked for its
            model, a warm-up that failed. Requests of the run that fail are in its report.
    """
    async with make_target(check_settings(settings)) as target:
        model = await target.choose_model()
        requests, warmup = await asyncio.to_thread(_make_workload, settings, model.vocab_size)
        if on_start is not None:
            on_start(len(requests))
        loop, samples = await _drive(target, requests, warmup, settings, on_done)
    figures = describe_samples(samples, goodput=settings.goodput or None)
    figures["notes"] += _notes(settings, requests, loop)
    return BenchRun({"model": model.name, "loop": loop, "settings": settings.describe(), **figures}, samples)


def make_target(settings: BenchSettings) -> GrpcTarget | OpenAiTarget:
    """The target, not yet opened.

    Raises:
        MeshError: see OpenAiTarget.
    """
    api_key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    if settings.backend == "grpc":
        return GrpcTarget(
            str(settings.gateway),
            model=settings.model,
            temperature=settings.temperature,
            ignore_eos=settings.ignore_eos,
            api_key=api_key,
            authority=settings.authority,
        )
    return OpenAiTarget(
        str(settings.base_url),
        model=settings.model,
        chat=settings.backend == "openai-chat",
        temperature=settings.temperature,
        ignore_eos=settings.ignore_eos,
        extra_body=settings.extra_body,
        api_key=api_key,
    )


def _make_workload(
    settings: BenchSettings, vocab_size: int | None
) -> tuple[list[LoadRequest], list[LoadRequest]]:
    requests = make_requests(settings, vocab_size=vocab_size)
    if settings.request_rate is not None:
        requests = spread_arrivals(
            requests,
            request_rate=settings.request_rate,
            burstiness=settings.burstiness,
            seed=settings.seed,
        )
    return requests, make_warm_up(settings, vocab_size=vocab_size)


async def _drive(
    target: Target,
    requests: list[LoadRequest],
    warmup: list[LoadRequest],
    settings: BenchSettings,
    on_done: OnDone | None,
) -> tuple[str, list[Sample]]:
    """(open or closed, samples). A trace in which every line says when is replayed at its own pace."""
    if all(request.at_s is not None for request in requests):
        samples = await run_open_loop(
            target, requests, max_concurrency=settings.max_concurrency, warmup=warmup, on_done=on_done
        )
        return "open", samples
    samples = await run_closed_loop(
        target, requests, concurrency=settings.concurrency, warmup=warmup, on_done=on_done
    )
    return "closed", samples


def _notes(settings: BenchSettings, requests: list[LoadRequest], loop: str) -> list[str]:
    wanted = PROMPTS_PER_CLIENT * settings.concurrency
    if loop == "open" or len(requests) >= wanted:
        return []
    note = (
        f"{len(requests)} prompts for {settings.concurrency} clients: with fewer than {wanted} a run is "
        "mostly its beginning and its end"
    )
    return [note]
