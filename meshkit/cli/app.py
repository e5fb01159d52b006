"""The commands and their flags. What a command does lies in the modules beside it, imported when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import grpc
import typer

from meshkit.cli.terminal import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    one_line,
    print_error,
    print_json,
)
from meshkit.config import LogLevel
from meshkit.errors import MeshError

# The base of all usage errors: typer gives it no name, and keeps it elsewhere from release to release.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="chipmesh",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
SchedulerEndpoint = Annotated[
    str | None, typer.Option("--endpoint", help="HOST:PORT of a scheduler. Default: of `up`'s mesh.")
]
Emulate = Annotated[
    bool, typer.Option("--emulate", help="Run on the plugin's emulator of its chip: its option emulate=true.")
]
ConfigFile = Annotated[Path, typer.Option("--config", help="The service's configuration, a JSON file.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"chipmesh {metadata.version('chipmesh')}")
        raise typer.Exit


@app.callback()
def chipmesh(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serves language models over a mesh of different chips."""


@app.command()
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
        typer.Option(help="BACKEND:INDEX,... per group, groups split by ';'. Default: one device."),
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
    quantization: Annotated[str, typer.Option(help="Quantise weights on load: w8a8 or w4a16.")] = "",
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
    host: Annotated[str, typer.Option(help="Host of the gateway's two listeners.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port of the gateway; 0: a free one.")] = 0,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port of the gateway; 0: a free one.")
    ] = 0,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send traces there, for instance http://127.0.0.1:4317.")
    ] = None,
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


@app.command(hidden=True)
def launch(options: Annotated[Path, typer.Option(help="Written by `up --detach`.")]) -> int:
    """The detached half of `up --detach`: prints its events as JSON lines."""
    from meshkit.cli.up import launch_detached

    return launch_detached(options)


@app.command()
def down(as_json: AsJson = False) -> int:
    """Stop the mesh that `up` started. Nothing to stop is no error."""
    from meshkit.cli.down import stop

    stop(as_json=as_json)
    return EXIT_OK


@app.command()
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


@app.command()
def status(
    endpoint: SchedulerEndpoint = None,
    as_json: AsJson = False,
) -> int:
    """Show groups, replicas, their requests and pages."""
    from meshkit.cli.mesh_status import show_status

    show_status(endpoint=endpoint, as_json=as_json)
    return EXIT_OK


@app.command()
def swap(
    worker: Annotated[str, typer.Argument(help="The worker, as `chipmesh status` names it.")],
    to: Annotated[str, typer.Option(help="Plugin of the new chip. Default: the same one, loaded anew.")] = "",
    device: Annotated[int, typer.Option(min=0, help="Index of the new chip.")] = 0,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the plugin; may be repeated.")
    ] = None,
    emulate: Emulate = False,
    model_path: Annotated[str, typer.Option(help="Other weights of the same model, where they lie.")] = "",
    never_pause: Annotated[
        bool, typer.Option("--never-pause", help="Fail where the new one does not fit beside the old one.")
    ] = False,
    endpoint: SchedulerEndpoint = None,
    as_json: AsJson = False,
) -> int:
    """Change a worker's chip or weights while its streams run: the new one is loaded beside the old one, then
    takes over. Where both do not fit, the old one goes first and its streams move to peers or pause.
    """
    from meshkit.cli.swap import swap_chip
    from meshkit.cli.tools import plugin_options

    options = plugin_options(option, emulate=emulate)
    swap_chip(
        worker,
        backend=to,
        device=device,
        options=options,
        model_path=model_path,
        never_pause=never_pause,
        endpoint=endpoint,
        as_json=as_json,
    )
    return EXIT_OK


traffic = typer.Typer(help="How requests are split among a model's groups.", no_args_is_help=True)
app.add_typer(traffic, name="traffic")


@traffic.command("show")
def traffic_show(endpoint: SchedulerEndpoint = None, as_json: AsJson = False) -> int:
    """Show each group's weight, and the share of requests that it gets now."""
    from meshkit.cli.traffic import show_traffic

    show_traffic(endpoint=endpoint, as_json=as_json)
    return EXIT_OK


@traffic.command("set")
def traffic_set(
    weights: Annotated[list[str], typer.Argument(help="GROUP=WEIGHT ...; groups left out get 0.")],
    model: Annotated[str, typer.Option(help="Which model's groups. Default: the only one.")] = "",
    endpoint: SchedulerEndpoint = None,
    as_json: AsJson = False,
) -> int:
    """Change the weights while requests run; those that run stay where they are."""
    from meshkit.cli.traffic import set_traffic

    set_traffic(weights, model=model, endpoint=endpoint, as_json=as_json)
    return EXIT_OK


@traffic.command("shadow")
def traffic_shadow(
    source: Annotated[str, typer.Argument(help="Group whose requests are mirrored.")],
    shadow: Annotated[str, typer.Argument(help="Group that gets the copies; its answers are not served.")],
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of requests; 0 ends it.")] = 0.1,
    endpoint: SchedulerEndpoint = None,
    as_json: AsJson = False,
) -> int:
    """Mirror a share of a group's requests to another group and compare the answers."""
    from meshkit.cli.traffic import set_shadow

    set_shadow(source=source, shadow=shadow, share=share, endpoint=endpoint, as_json=as_json)
    return EXIT_OK


group = typer.Typer(help="Settings of a group of replicas.", no_args_is_help=True)
app.add_typer(group, name="group")


@group.command("set")
def group_set(
    name: Annotated[str, typer.Argument(help="The group.")],
    chunked_prefill_size: Annotated[
        int | None, typer.Option(min=0, help="Most prompt tokens of a step; 0: what each replica takes.")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(min=0, help="Most requests at once per replica; 0: what each takes.")
    ] = None,
    schedule_policy: Annotated[
        str | None, typer.Option(help="Order of waiting requests: fcfs, lpm, ...")
    ] = None,
    endpoint: SchedulerEndpoint = None,
    as_json: AsJson = False,
) -> int:
    """Change settings of a group while it runs; requests beyond a lower ceiling go on to their end."""
    from meshkit.cli.group import set_group

    set_group(
        name,
        chunked_prefill_size=chunked_prefill_size,
        max_running_requests=max_running_requests,
        schedule_policy=schedule_policy,
        endpoint=endpoint,
        as_json=as_json,
    )
    return EXIT_OK


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Name of a model, for instance smollm2-135m.")],
    as_json: AsJson = False,
) -> int:
    """Fetch a model into the cache; one that is there already returns at once."""
    from meshkit.cli.pull import pull as pull_named

    pull_named(name, as_json=as_json)
    return EXIT_OK


@app.command()
def gateway(config: ConfigFile) -> int:
    """Run the gateway service alone."""
    return _run_service("gateway", config)


@app.command()
def scheduler(config: ConfigFile) -> int:
    """Run the scheduler service alone."""
    return _run_service("scheduler", config)


@app.command()
def worker(config: ConfigFile) -> int:
    """Run one worker service alone."""
    return _run_service("worker", config)


@app.command()
def conformance(
    backend: Annotated[str, typer.Option(help="Name of the plugin to check.")] = "",
    address: Annotated[
        str, typer.Option(help="HOST:PORT of a running executor to check, in place of --backend.")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the plugin; may be repeated.")
    ] = None,
    emulate: Emulate = False,
    only: Annotated[str, typer.Option("--only", "-k", help="Run the checks whose name contains this.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Leave heavy shape classes out.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that each check may take.")] = 120.0,
    junit: Annotated[Path | None, typer.Option(help="Write the results there as JUnit XML.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check a plugin: does it do what it declares? Exit code 1 where any check fails."""
    from meshkit.cli.backend_options import read_backend_options
    from meshkit.cli.tools import plugin_options, run_named_tool

    words = plugin_options(option, emulate=emulate)
    return run_named_tool(
        "conformance",
        backend=backend,
        address=address,
        options=read_backend_options(words, flag="--option"),
        only=only,
        quick=quick,
        timeout_s=timeout,
        junit=junit,
        as_json=as_json,
    )


@app.command()
def verify(
    backend: Annotated[str, typer.Option(help="Name of the plugin to look at.")],
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the plugin; may be repeated.")
    ] = None,
    emulate: Emulate = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that each check may take.")] = 60.0,
    as_json: AsJson = False,
) -> int:
    """Check a plugin before any model: it loads, versions fit, devices are real. Exit code 1 on a failure."""
    from meshkit.cli.backend_options import read_backend_options
    from meshkit.cli.tools import plugin_options, run_named_tool

    words = plugin_options(option, emulate=emulate)
    options = read_backend_options(words, flag="--option")
    return run_named_tool("verify", backend=backend, options=options, timeout_s=timeout, as_json=as_json)


@app.command()
def collectives(
    backend: Annotated[str, typer.Option(help="Name of the plugin whose collectives are run.")],
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Processes, one rank each.")],
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the plugin; may be repeated.")
    ] = None,
    emulate: Emulate = False,
    sizes: Annotated[
        str, typer.Option(help="FIRST..LAST, each four times the last one; or SIZE,SIZE,...")
    ] = "1KiB..64MiB",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until all ranks must have come.")] = 60.0,
    absent_rank: Annotated[
        int | None, typer.Option(min=0, help="Leave this rank out, to see that it is named.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run each collective between processes: right values, latency, bandwidth. Exit code 1 on a failure."""
    from meshkit.cli.backend_options import read_backend_options
    from meshkit.cli.tools import plugin_options, run_named_tool

    words = plugin_options(option, emulate=emulate)
    return run_named_tool(
        "collectives",
        backend=backend,
        options=read_backend_options(words, flag="--option"),
        ranks=ranks,
        sizes=sizes,
        timeout_s=timeout,
        absent_rank=absent_rank,
        as_json=as_json,
    )


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Folder, .gguf, or the name of a pulled model.")],
    backend: Annotated[str, typer.Option(help="Name of the plugin to plan for.")],
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the plugin; may be repeated.")
    ] = None,
    emulate: Emulate = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or a dtype that the chip reports.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Quantise weights on load: w8a8 or w4a16.")] = "",
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a KV page.")] = None,
    chunked_prefill_size: Annotated[int | None, typer.Option(help="Most prompt tokens of a step.")] = None,
    max_running_requests: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a reference operator.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show how a model would run on a chip: each operator native or not, and why. Reads no weights."""
    from meshkit.cli.tools import plugin_options, run_named_tool

    request = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
        "page_size": page_size,
        "chunk_tokens": chunked_prefill_size,
        "max_running_requests": max_running_requests,
        "strict": strict,
    }
    options = plugin_options(option, emulate=emulate)
    return run_named_tool(
        "plan", model=model, backend=backend, options=options, request=request, as_json=as_json
    )


@app.command()
def diff(
    model: Annotated[str, typer.Option(help="Folder, .gguf, or the name of a pulled model.")],
    left: Annotated[str, typer.Option(help="Name of a plugin, or `reference`: the framework's, in float32.")],
    right: Annotated[str, typer.Option(help="What to compare it with: as --left.")],
    left_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the left plugin; may be repeated.")
    ] = None,
    right_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the right plugin; may be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, safetensors, gguf, dummy.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Quantise weights on load: w8a8 or w4a16.")] = "",
    prompt: Annotated[str | None, typer.Option(help="A text to run. Default: built-in token ids.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show each side's statistics by layer.")] = False,
    as_json: AsJson = False,
) -> int:
    """Run one input on two back ends; name the first layer and operator that diverge. Exit code 1 if any."""
    from meshkit.cli.backend_options import read_backend_options
    from meshkit.cli.tools import run_named_tool

    return run_named_tool(
        "diff",
        model=model,
        left=left,
        right=right,
        left_options=read_backend_options(left_option or (), flag="--left-option"),
        right_options=read_backend_options(right_option or (), flag="--right-option"),
        request={"dtype": dtype, "load_format": load_format, "quantization": quantization},
        prompt=prompt,
        layers=layers,
        as_json=as_json,
    )


@app.command()
def simulate(
    fleet: Annotated[Path, typer.Option(help="JSON with groups of replicas of modelled chips.")],
    trace: Annotated[Path | None, typer.Option(help="JSONL in Mooncake's form. Default: synthetic.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Synthetic: requests per second.")] = 10.0,
    speed: Annotated[float, typer.Option(min=1e-6, help="Replay a trace at so many times its pace.")] = 1.0,
    ttft_bound_ms: Annotated[float, typer.Option(min=0, help="Goodput: longest time to first token.")] = 2000,
    tpot_bound_ms: Annotated[float, typer.Option(min=0, help="Goodput: longest time per token.")] = 100,
    as_json: AsJson = False,
) -> int:
    """Replay requests through the real scheduler core on modelled chips, on a virtual clock."""
    from meshkit.cli.tools import run_named_tool

    return run_named_tool(
        "simulate",
        fleet=fleet,
        trace=trace,
        requests=requests,
        rate=rate,
        speed=speed,
        ttft_bound_ms=ttft_bound_ms,
        tpot_bound_ms=tpot_bound_ms,
        as_json=as_json,
    )


@app.command()
def chaos(
    name: Annotated[
        str | None, typer.Argument(help="A scenario, for instance R1, or `all`. Default: list them.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="How often. Default: 10.")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Streams beside the fault. Default: 32.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="As often and as wide as the scoreboard wants.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of prompts, victims, phases. Default: new.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the services' logs in this folder.")] = None,
    as_json: AsJson = False,
) -> int:
    """Do harm to a mesh of real processes; exit code 1 if a client loses a token by it, or waits too long."""
    from meshkit.cli.tools import run_named_tool

    return run_named_tool(
        "chaos",
        scenario=name,
        runs=runs,
        streams=streams,
        full=full,
        seed=seed,
        logs=logs,
        as_json=as_json,
    )


def _run_service(name: str, config: Path) -> int:
    from meshkit.cli.services import run_named_service

    return run_named_service(name, config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (default: of this process' arguments) and returns the exit code.

    0: done. 1: it failed. 2: the command line is wrong. 130: interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in words
    try:
        result = app(args=words, prog_name="chipmesh", standalone_mode=False)
    except UsageError as error:
        _print_usage_error(error, as_json=as_json)
        return EXIT_USAGE
    except MeshError as error:
        print_error(error, as_json=as_json)
        return EXIT_USAGE if _is_about_a_flag(error) else EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); stdout must not be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _print_usage_error(error: Exception, *, as_json: bool) -> None:
    command = getattr(getattr(error, "ctx", None), "command_path", None) or "chipmesh"
    text = one_line(getattr(error, "format_message", error.__str__)())
    print(
        f"chipmesh: {text.rstrip('.')}; `{command} --help` lists what is known", file=sys.stderr, flush=True
    )
    if as_json:
        print_json(
            {"error": {"code": "USAGE", "reason": "USAGE", "message": text, "field": None, "metadata": {}}}
        )


def _is_about_a_flag(error: MeshError) -> bool:
    return error.code is grpc.StatusCode.INVALID_ARGUMENT and (error.field or "").startswith("--")
