"""What a chip's vendor runs: does a plugin do what it declares, and how would a model run on it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.cli.commands.flags import AsJson, Emulate, PluginOptions

commands = typer.Typer()


@commands.command()
def conformance(
    backend: Annotated[str, typer.Option(help="Name of the plugin to check.")] = "",
    address: Annotated[
        str, typer.Option(help="HOST:PORT of a running executor to check, in place of --backend.")
    ] = "",
    option: PluginOptions = None,
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


@commands.command()
def verify(
    backend: Annotated[str, typer.Option(help="Name of the plugin to look at.")],
    option: PluginOptions = None,
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


@commands.command()
def collectives(
    backend: Annotated[str, typer.Option(help="Name of the plugin whose collectives are run.")],
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Processes, one rank each.")],
    option: PluginOptions = None,
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


@commands.command()
def plan(
    model: Annotated[str, typer.Option(help="Folder, .gguf, or the name of a pulled model.")],
    backend: Annotated[str, typer.Option(help="Name of a plugin: how each operator runs on it.")] = "",
    device_groups: Annotated[
        str, typer.Option(help="What fits on these chips: as of `up`, such as cpu:0+cpu:1,cpu:2.")
    ] = "",
    chips: Annotated[
        Path | None, typer.Option(help="A YAML file that describes chips which are not here.")
    ] = None,
    host_devices: Annotated[
        int | None, typer.Option(min=1, help="Chips of a machine. Default: all are in one.")
    ] = None,
    tp_size: Annotated[int | None, typer.Option(min=1, help="Ranks that share each layer.")] = None,
    pp_size: Annotated[int | None, typer.Option(min=1, help="Stages that layers are split over.")] = None,
    mem_fraction_static: Annotated[
        float | None, typer.Option(help="Weights and KV cache as a share of the memory, in (0, 1].")
    ] = None,
    max_total_tokens: Annotated[int | None, typer.Option(min=1, help="KV cache in tokens.")] = None,
    option: PluginOptions = None,
    emulate: Emulate = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or a dtype that the chip reports.")] = "auto",
    quantization: Annotated[str, typer.Option(help="w8a8, w4a16: weights; a8: activations to int8.")] = "",
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a KV page.")] = None,
    chunked_prefill_size: Annotated[int | None, typer.Option(help="Most prompt tokens of a step.")] = None,
    max_running_requests: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a reference operator.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show how a model would run: operators on a chip, memory of sets of chips. Reads no weights. Exit code 1
    where it does not fit.
    """
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
        "plan",
        model=model,
        backend=backend,
        device_groups=device_groups,
        chips=chips,
        options=options,
        request=request,
        kv={"mem_fraction_static": mem_fraction_static, "max_total_tokens": max_total_tokens},
        layout={"tensor": tp_size, "pipeline": pp_size, "host_devices": host_devices},
        as_json=as_json,
    )


@commands.command()
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
