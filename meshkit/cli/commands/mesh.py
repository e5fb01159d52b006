"""A mesh on this machine, and what a user asks it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.cli.commands.flags import AsJson, Emulate, OperatorTls, SchedulerEndpoint
from meshkit.cli.terminal import EXIT_OK
from meshkit.config import LogLevel

commands = typer.Typer()


@commands.command()
def up(
    context: typer.Context,
    model_path: Annotated[
        str, typer.Option(help="A folder, a .gguf file, or the name of a pulled model.")
    ] = "",
    backend: Annotated[str, typer.Option(help="Plugin to use where --device-groups is not given.")] = "cpu",
    backend_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the plugin; may be repeated.")
    ] = None,
    emulate: Emulate = False,
    device_groups: Annotated[
        str | None,
        typer.Option(
            help="BACKEND:INDEX,... per group, groups split by ';', chips of one replica joined by '+'. "
            "Default: one device."
        ),
    ] = None,
    tp_size: Annotated[
        int | None,
        typer.Option("--tp-size", min=1, help="Chips of a replica that share each layer. Default: as fits."),
    ] = None,
    pp_size: Annotated[
        int | None,
        typer.Option(
            "--pp-size", min=1, help="Stages that a replica's layers are split over. Default: as fits"
        ),
    ] = None,
    groups_file: Annotated[
        Path | None,
        typer.Option(help="JSON with groups, their devices, weights, models and settings of their own."),
    ] = None,
    traffic_file: Annotated[
        Path | None, typer.Option(help="JSON with weights of groups by model, watched while the mesh runs.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, safetensors, gguf, dummy.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or a dtype that the chip reports.")] = "auto",
    quantization: Annotated[str, typer.Option(help="w8a8, w4a16: weights; a8: activations to int8.")] = "",
    chunked_prefill_size: Annotated[
        int | None, typer.Option(help="Most prompt tokens of a step; -1: off.")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(help="Most requests at once per replica.")
    ] = None,
    mem_fraction_static: Annotated[
        float | None, typer.Option(help="Share of memory for weights and KV.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens of a KV page.")] = None,
    schedule_policy: Annotated[
        str | None, typer.Option(help="Order of waiting requests: fcfs, lpm, ...")
    ] = None,
    step_window_s: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Decode steps of so many seconds share a message; default: the chip's."
        ),
    ] = None,
    schedule_conservativeness: Annotated[
        float | None, typer.Option(min=0, help="Factor on the room kept free for running requests; 1.")
    ] = None,
    radix_eviction_policy: Annotated[
        str | None, typer.Option(help="Which cached prefix goes first: lru, lfu, slru, priority.")
    ] = None,
    radix_attention_min_len: Annotated[
        int | None, typer.Option(min=0, help="Prefixes of fewer tokens are not kept.")
    ] = None,
    enable_priority_preemption: Annotated[
        bool, typer.Option("--enable-priority-preemption", help="Higher priorities push running ones out.")
    ] = False,
    max_total_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache in tokens.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in requests; default: the model's.")
    ] = None,
    disable_radix_cache: Annotated[
        bool, typer.Option("--disable-radix-cache", help="No reuse of prefixes.")
    ] = False,
    disable_overlap_schedule: Annotated[
        bool, typer.Option("--disable-overlap-schedule", help="Plan a step only after the last one's result.")
    ] = False,
    enable_mixed_chunk: Annotated[
        bool | None,
        typer.Option("--enable-mixed-chunk/--disable-mixed-chunk", help="Prefill and decode in one step."),
    ] = None,
    host: Annotated[str, typer.Option(help="Host of the gateway's listeners.")] = "127.0.0.1",
    api_keys_file: Annotated[
        Path | None, typer.Option(help="JSON with the keys of clients (`chipmesh keys new` prints one).")
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Serve everybody although --host is beyond loopback.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port of the gateway; 0: a free one.")] = 0,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port of the gateway; 0: a free one.")
    ] = 0,
    openai_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the gateway's OpenAI HTTP interface; 0: a free one."),
    ] = 0,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send traces there, for instance http://127.0.0.1:4317.")
    ] = None,
    page_traces: Annotated[
        bool, typer.Option(help="Without --otlp-endpoint: some traces a second, shown by the page.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a plugin that lacks an operator.")] = False,
    executor_python: Annotated[str | None, typer.Option(help="Interpreter that runs the executors.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least level of what services log.")] = "info",
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until all must be ready.")] = 600.0,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; the mesh stays up.")] = False,
    as_json: AsJson = False,
) -> int:
    """Start a mesh on this machine: scheduler, gateway, one worker per device. Ctrl-C stops it."""
    from meshkit.cli.up import read_options, start_mesh

    start_mesh(read_options(context.params), detach=detach, as_json=as_json)
    return EXIT_OK


@commands.command(hidden=True)
def launch(options: Annotated[Path, typer.Option(help="Written by `up --detach`.")]) -> int:
    """The detached half of `up --detach`: prints its events as JSON lines."""
    from meshkit.cli.up import launch_detached

    return launch_detached(options)


@commands.command()
def down(as_json: AsJson = False) -> int:
    """Stop the mesh that `up` started. Nothing to stop is no error."""
    from meshkit.cli.down import stop

    stop(as_json=as_json)
    return EXIT_OK


@commands.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Sent as one user message through the model's template.")],
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 or -1: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].")] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1].")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be repeated.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the text without the model's template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    model: Annotated[str, typer.Option(help="Default: the only model served.")] = "",
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--gateway",
            "--endpoint",
            metavar="ADDRESS[,ADDRESS...]",
            help="Gateways; when one is lost, the next goes on. Default: of `up`'s mesh.",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds until the answer must be whole.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Ask the model; the answer is streamed to the terminal."""
    from meshkit.cli.ask import ask

    ask(context.params, endpoint=endpoint, timeout_s=timeout, as_json=as_json)
    return EXIT_OK


@commands.command()
def status(
    endpoint: SchedulerEndpoint = None,
    tls: OperatorTls = None,
    as_json: AsJson = False,
) -> int:
    """Show groups, replicas, their requests and pages."""
    from meshkit.cli.mesh_status import show_status

    show_status(endpoint=endpoint, tls=tls, as_json=as_json)
    return EXIT_OK


@commands.command()
def pull(
    name: Annotated[str, typer.Argument(help="Name of a model, for instance smollm2-135m.")],
    as_json: AsJson = False,
) -> int:
    """Fetch a model into the cache; one that is there already returns at once."""
    from meshkit.cli.pull import pull as pull_named

    pull_named(name, as_json=as_json)
    return EXIT_OK
