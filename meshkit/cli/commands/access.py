"""Who may use a mesh and who is who in it: keys of clients, certificates of services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.cli.commands.flags import AsJson
from meshkit.cli.terminal import EXIT_OK

commands = typer.Typer()

keys = typer.Typer(help="Keys by which clients use a gateway.", no_args_is_help=True)
commands.add_typer(keys, name="keys")


@keys.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(help="Whose key it is: in metrics, traces and the log.")],
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Its budget of requests. Default: no limit.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Its budget of prompt and output tokens. Default: no limit.")
    ] = None,
    max_live_requests: Annotated[
        int | None, typer.Option(min=1, help="Most of its requests at once. Default: no limit.")
    ] = None,
    share_cache: Annotated[
        bool, typer.Option("--share-cache", help="Share cached prefixes with all others that share.")
    ] = False,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may see and steer the mesh by the gateway's page.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Print a new key, this once, and the entry for the gateway's `api_keys` that lets it in."""
    from meshkit.cli.keys import new_key

    new_key(
        name,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_live_requests=max_live_requests,
        share_cache=share_cache,
        operator=operator,
        as_json=as_json,
    )
    return EXIT_OK


certs = typer.Typer(help="Certificates by which services know each other.", no_args_is_help=True)
commands.add_typer(certs, name="certs")

CertificateRoot = Annotated[Path, typer.Argument(help="The folder of the mesh's certificates.")]
Days = Annotated[int, typer.Option(help="Days that new certificates are valid.")]
DEFAULT_DAYS = 90


@certs.command("create")
def certs_create(
    folder: CertificateRoot,
    gateway: Annotated[list[str] | None, typer.Option(help="Name of a gateway; may be repeated.")] = None,
    scheduler: Annotated[list[str] | None, typer.Option(help="Name of the scheduler.")] = None,
    worker: Annotated[list[str] | None, typer.Option(help="Id of a worker; may be repeated.")] = None,
    operator: Annotated[
        list[str] | None, typer.Option(help="Name of somebody who commands the mesh; may be repeated.")
    ] = None,
    days: Days = DEFAULT_DAYS,
    as_json: AsJson = False,
) -> int:
    """Make what is missing: an authority, and a folder with certificate and key for each name. What is there
    stays while it has a third of its life left, so this may run before every start.
    """
    from meshkit.cli.certs import create_certificates
    from meshkit.rpc.policy import Role

    names = {
        Role.GATEWAY: gateway or [],
        Role.SCHEDULER: scheduler or [],
        Role.WORKER: worker or [],
        Role.OPERATOR: operator or [],
    }
    create_certificates(folder, names, days=days, as_json=as_json)
    return EXIT_OK


@certs.command("rotate")
def certs_rotate(
    folder: CertificateRoot,
    authority: Annotated[
        bool, typer.Option("--authority", help="By a new authority, too; the former is trusted beside it.")
    ] = False,
    retire: Annotated[
        bool, typer.Option("--retire", help="Instead: trust the present authority alone.")
    ] = False,
    days: Days = DEFAULT_DAYS,
    as_json: AsJson = False,
) -> int:
    """New keys and certificates for everybody; services take them up by themselves, streams go on."""
    from meshkit.cli.certs import rotate_certificates

    rotate_certificates(folder, new_authority=authority, retire=retire, days=days, as_json=as_json)
    return EXIT_OK


@certs.command("show")
def certs_show(folder: CertificateRoot, as_json: AsJson = False) -> int:
    """Show whose certificates there are, until when, and their fingerprints."""
    from meshkit.cli.certs import show_certificates

    show_certificates(folder, as_json=as_json)
    return EXIT_OK
