"""What an operator changes while a mesh serves: chips, traffic, groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.cli.commands.flags import AsJson, Emulate, OperatorTls, PluginOptions, SchedulerEndpoint
from meshkit.cli.terminal import EXIT_OK

commands = typer.Typer()


@commands.command()
def swap(
    worker: Annotated[str, typer.Argument(help="The worker, as `chipmesh status` names it.")],
    to: Annotated[str, typer.Option(help="Plugin of the new chip. Default: the same one, loaded anew.")] = "",
    device: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Index of the new chip; again for each further rank of a set. Default: 0."),
    ] = None,
    tp_size: Annotated[
        int | None, typer.Option("--tp-size", min=1, help="Ranks that share each layer of the new set.")
    ] = None,
    pp_size: Annotated[int | None, typer.Option("--pp-size", min=1, help="Stages of the new set.")] = None,
    option: PluginOptions = None,
    emulate: Emulate = False,
    model_path: Annotated[str, typer.Option(help="Other weights of the same model, where they lie.")] = "",
    never_pause: Annotated[
        bool, typer.Option("--never-pause", help="Fail where the new one does not fit beside the old one.")
    ] = False,
    endpoint: SchedulerEndpoint = None,
    tls: OperatorTls = None,
    as_json: AsJson = False,
) -> int:
    """Change a worker's chip or weights while its streams run: the new one is loaded beside the old one, then
    takes over. Where both do not fit, the old one goes first and its streams move to peers or pause.
    """
    from meshkit.cli.swap import NewChips, swap_chip
    from meshkit.cli.tools import plugin_options

    options = plugin_options(option, emulate=emulate)
    swap_chip(
        worker,
        chips=NewChips(to, device or (), tp_size, pp_size, options),
        model_path=model_path,
        never_pause=never_pause,
        endpoint=endpoint,
        tls=tls,
        as_json=as_json,
    )
    return EXIT_OK


@commands.command()
def profile(
    worker: Annotated[
        str,
        typer.Option("--worker", help="The worker, as `chipmesh status` names it. Default: the only one."),
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long to record.")] = 5.0,
    output: Annotated[
        Path | None, typer.Option(help="File of the trace. Default: chipmesh-profile-WORKER.json here.")
    ] = None,
    endpoint: SchedulerEndpoint = None,
    tls: OperatorTls = None,
    as_json: AsJson = False,
) -> int:
    """Record a worker's device while it serves: time by operator class, gaps, and a trace that
    ui.perfetto.dev opens.
    """
    from meshkit.cli.profile import profile_worker

    profile_worker(worker, seconds=seconds, output=output, endpoint=endpoint, tls=tls, as_json=as_json)
    return EXIT_OK


@commands.command()
def doctor(
    endpoint: SchedulerEndpoint = None,
    gateway: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A gateway. Default: of `up`'s mesh.")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(help="Configuration of a service, a file or folder, to check as well; may be repeated."),
    ] = None,
    tls: OperatorTls = None,
    as_json: AsJson = False,
) -> int:
    """Check a running mesh and say how to mend what is wrong with it. Exit code 1 where anything is."""
    from meshkit.cli.doctor.command import run_doctor

    return run_doctor(endpoint=endpoint, gateway=gateway, configs=config or (), tls=tls, as_json=as_json)


traffic = typer.Typer(help="How requests are split among a model's groups.", no_args_is_help=True)
commands.add_typer(traffic, name="traffic")


@traffic.command("show")
def traffic_show(endpoint: SchedulerEndpoint = None, tls: OperatorTls = None, as_json: AsJson = False) -> int:
    """Show each group's weight, and the share of requests that it gets now."""
    from meshkit.cli.traffic import show_traffic

    show_traffic(endpoint=endpoint, tls=tls, as_json=as_json)
    return EXIT_OK


@traffic.command("set")
def traffic_set(
    weights: Annotated[list[str], typer.Argument(help="GROUP=WEIGHT ...; groups left out get 0.")],
    model: Annotated[str, typer.Option(help="Which model's groups. Default: the only one.")] = "",
    endpoint: SchedulerEndpoint = None,
    tls: OperatorTls = None,
    as_json: AsJson = False,
) -> int:
    """Change the weights while requests run; those that run stay where they are."""
    from meshkit.cli.traffic import set_traffic

    set_traffic(weights, model=model, endpoint=endpoint, tls=tls, as_json=as_json)
    return EXIT_OK


@traffic.command("shadow")
def traffic_shadow(
    source: Annotated[str, typer.Argument(help="Group whose requests are mirrored.")],
    shadow: Annotated[str, typer.Argument(help="Group that gets the copies; its answers are not served.")],
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of requests; 0 ends it.")] = 0.1,
    endpoint: SchedulerEndpoint = None,
    tls: OperatorTls = None,
    as_json: AsJson = False,
) -> int:
    """Mirror a share of a group's requests to another group and compare the answers."""
    from meshkit.cli.traffic import set_shadow

    set_shadow(source=source, shadow=shadow, share=share, endpoint=endpoint, tls=tls, as_json=as_json)
    return EXIT_OK


group = typer.Typer(help="Settings of a group of replicas.", no_args_is_help=True)
commands.add_typer(group, name="group")


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
    tls: OperatorTls = None,
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
        tls=tls,
        as_json=as_json,
    )
    return EXIT_OK
