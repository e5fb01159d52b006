"""`chipmesh tune`: settings of a group that suit a load best, measured on its chips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.cli.commands.flags import AsJson, Emulate, OperatorTls, SchedulerEndpoint

commands = typer.Typer()


@commands.command()
def tune(
    context: typer.Context,
    group: Annotated[str, typer.Option(help="A group of the running mesh, or of --groups-file.")] = "",
    model_path: Annotated[
        str, typer.Option(help="Start a mesh for it: a folder, a .gguf file, or a pulled model.")
    ] = "",
    groups_file: Annotated[
        Path | None, typer.Option(help="Start a mesh for the group --group of this file of `up`.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Plugin of that mesh.")] = "cpu",
    device: Annotated[int, typer.Option(min=0, help="Index of its chip.")] = 0,
    device_groups: Annotated[
        str | None, typer.Option(help="Members of its group, as `up` has them, in place of both.")
    ] = None,
    backend_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the plugin; may be repeated.")
    ] = None,
    emulate: Emulate = False,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    load_format: Annotated[str | None, typer.Option(help="auto, safetensors, gguf, dummy.")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto, or a dtype that the chip reports.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="w8a8, w4a16, a8.")] = None,
    chunked_prefill_size: Annotated[
        int | None, typer.Option(help="The default to start from; else the chip's.")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(help="The default to start from; else the chip's.")
    ] = None,
    step_window_s: Annotated[
        float | None, typer.Option(min=0, max=1, help="The default to start from; else the chip's.")
    ] = None,
    mem_fraction_static: Annotated[
        float | None, typer.Option(help="Share of memory for weights and KV.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens of a KV page.")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache in tokens.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until a mesh must be ready.")] = 600.0,
    objective: Annotated[
        str, typer.Option(help="throughput, goodput, or ttft at no fewer tokens/s.")
    ] = "throughput",
    goodput: Annotated[
        list[str] | None, typer.Option(help="Bounds in ms, as 'ttft:500 tpot:50' (also e2e).")
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="The load: random, shared-prefix, multi-turn, tree or trace.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="JSONL of --dataset-name trace: Mooncake's form, or prompts.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests of a run. Default: 5 for each client, or 100, or the trace.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, or inf. Default: closed loop.")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="Of open-loop arrivals: 1 is Poisson.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Clients of a closed loop (8); most at once in an open one.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before each run that do not count.")] = 1,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt, or of its own part.")] = 100,
    random_output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    shared_prefix_len: Annotated[int, typer.Option(help="shared-prefix: tokens of a prefix.")] = 1024,
    shared_prefix_groups: Annotated[int, typer.Option(help="shared-prefix: how many prefixes.")] = 1,
    turns: Annotated[int, typer.Option(help="multi-turn: requests of a session.")] = 4,
    tree_branches: Annotated[int, typer.Option(help="tree: children of a node.")] = 3,
    tree_depth: Annotated[int, typer.Option(help="tree: levels below the root.")] = 2,
    thought_len: Annotated[int, typer.Option(help="tree: tokens that a child adds.")] = 32,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    try_chunked_prefill_size: Annotated[
        str | None, typer.Option(help="Values, as 64,128; none: leave it. Default: 1/4 to 4 times.")
    ] = None,
    try_max_running_requests: Annotated[
        str | None, typer.Option(help="Values, as 8,16; none: leave it. Default: 1/4 to 4 times.")
    ] = None,
    try_step_window: Annotated[
        str | None, typer.Option(help="Seconds, as 0,0.03; none: leave it. Default: 0,0.02,0.05.")
    ] = None,
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds for all of it after the first start.")
    ] = 600.0,
    rounds: Annotated[
        int, typer.Option(min=4, help="Of the best beside the default, in turns, at the end.")
    ] = 5,
    output: Annotated[
        Path | None, typer.Option(help="Groups file to write; in one that is there, only this group changes.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what was found into this .svg or .png (extra `bench`).")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--put-back", help="Running group: go on with what was found, or not.")
    ] = True,
    gateway: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A gateway. Default: of `up`'s mesh.")
    ] = None,
    endpoint: SchedulerEndpoint = None,
    tls: OperatorTls = None,
    as_json: AsJson = False,
) -> int:
    """Find the chunk size, batch limit and step window with which a group serves a load best, and write its
    configuration. Never worse than what it starts from, by its own figures.
    """
    from meshkit.cli.tuning.command import tune as tune_group

    return tune_group(context.params, endpoint=endpoint, tls=tls, as_json=as_json)
