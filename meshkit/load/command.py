"""`chipmesh bench serve`: its flags, and what it prints. What it runs is imported when it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.load.figures import parse_goodput
from meshkit.load.plot import check_plot
from meshkit.load.settings import BenchSettings, parse_settings

# As in meshkit.cli.gateway_channel, which imports us.
GATEWAY_KEY_VARIABLE = "CHIPMESH_API_KEY"
AUTHORITY_VARIABLE = "CHIPMESH_GATEWAY_AUTHORITY"
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"


def serve(  # noqa: PLR0913, PLR0917 - each flag is a parameter
    context: typer.Context,
    backend: Annotated[str, typer.Option(help="grpc (ours), openai or openai-chat.")] = "grpc",
    gateway: Annotated[
        str | None,
        typer.Option("--gateway", "--endpoint", help="HOST:PORT for grpc. Default: of `up`'s mesh."),
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="http://HOST:PORT of an OpenAI server.")] = None,
    model: Annotated[str, typer.Option(help="Default: the only one served.")] = "",
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help=f"Variable with the API key. Default: {GATEWAY_KEY_VARIABLE}, {OPENAI_KEY_VARIABLE}."
        ),
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, shared-prefix, multi-turn, tree or trace.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="JSONL of --dataset-name trace: Mooncake's form, or prompts.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests. Default: 5 for each client, or 100, or the whole trace.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, or inf. Default: closed loop.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Of open-loop arrivals: 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Clients of a closed loop (8); most at once in an open one.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before the run that do not count.")] = 1,
    random_input_len: Annotated[
        int, typer.Option(help="Tokens of a prompt, or of its own part, a turn, a tree's root.")
    ] = 100,
    random_output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    shared_prefix_len: Annotated[int, typer.Option(help="shared-prefix: tokens of a prefix.")] = 1024,
    shared_prefix_groups: Annotated[int, typer.Option(help="shared-prefix: how many prefixes.")] = 1,
    turns: Annotated[int, typer.Option(help="multi-turn: requests of a session.")] = 4,
    tree_branches: Annotated[int, typer.Option(help="tree: children of a node.")] = 3,
    tree_depth: Annotated[int, typer.Option(help="tree: levels below the root.")] = 2,
    thought_len: Annotated[int, typer.Option(help="tree: tokens that a child adds.")] = 32,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json: send token ids as text (openai-chat needs it).")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Token ids there are. Default: asked.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of exactly --random-output-len tokens.")
    ] = True,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="openai: put into, or over, each request's body.")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Bounds in ms, as ttft:500 or 'ttft:500 tpot:50' (also e2e); may be repeated."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    output_file: Annotated[Path | None, typer.Option(help="Write the JSON object here, too.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the latencies into this .svg or .png (extra `bench`).")
    ] = None,
) -> int:
    """Load a server and measure it from the client's side; exit code 1 if any request failed."""
    flags = {name: value for name, value in context.params.items() if name in BenchSettings.model_fields}
    settings = read_settings(flags, api_key_env=api_key_env)
    if plot is not None:
        check_plot(plot)
    return _run(settings, as_json=as_json, output_file=output_file, plot=plot)


def read_settings(
    flags: Mapping[str, Any], *, api_key_env: str | None, source: str = "chipmesh bench serve"
) -> BenchSettings:
    """Settings from flags by typer's names; from the environment API key, authority and `up`'s mesh. source:
    the command.

    Raises:
        InvalidArgument: a flag, or two that do not go together.
    """
    ours = flags["backend"] == "grpc"
    found = {
        **flags,
        "extra_body": _read_object(flags["extra_body"]),
        "goodput": parse_goodput(flags["goodput"] or ()),
        "api_key": _read_key(api_key_env, default=GATEWAY_KEY_VARIABLE if ours else OPENAI_KEY_VARIABLE),
    }
    if ours:
        found["authority"] = os.environ.get(AUTHORITY_VARIABLE) or None
        if flags["base_url"] is None:
            found["gateway"] = _find_gateway(flags["gateway"])
    return parse_settings(found, source=source)


def _run(settings: BenchSettings, *, as_json: bool, output_file: Path | None, plot: Path | None) -> int:
    import uvloop  # noqa: PLC0415

    from meshkit.load.bench import run_bench  # noqa: PLC0415
    from meshkit.load.display import RunDisplay, print_report  # noqa: PLC0415
    from meshkit.load.plot import save_plot  # noqa: PLC0415

    with RunDisplay() as display:
        run = uvloop.run(run_bench(settings, on_start=display.begin, on_done=display.add))
    if output_file is not None:
        _write(output_file, json.dumps(run.report, indent=2) + "\n")
    if plot is not None:
        save_plot(plot, run.samples, title=f"{run.report['model']}: latencies")
    if as_json:
        sys.stdout.write(json.dumps(run.report) + "\n")
    else:
        print_report(run.report)
    return 1 if run.report["failed"] else 0


def _find_gateway(given: str | None) -> str:
    from meshkit.cli.state import require_endpoint, state_dir_from_environment  # noqa: PLC0415

    return require_endpoint(state_dir_from_environment(), kind="gateway", given=given)


def _read_key(variable: str | None, *, default: str) -> str | None:
    key = os.environ.get(variable or default, "").strip()
    if variable is not None and not key:
        raise InvalidArgument(
            f"--api-key-env: {variable} is not set; export it, or leave the flag out", field="--api-key-env"
        )
    return key or None


def _read_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"--extra-body is no JSON: {error}", field="--extra-body") from error
    if not isinstance(content, dict):
        raise InvalidArgument(
            f"--extra-body is {text!r}; a JSON object is allowed, as '{{\"min_tokens\": 64}}'",
            field="--extra-body",
        )
    return content


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FailedPrecondition(f"--output-file: {file} cannot be written: {error.strerror}") from error
