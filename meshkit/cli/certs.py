"""`chipmesh certs`: the certificates of a mesh, made, renewed and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshkit.certificates.folder import CertificateFolder, Made
from meshkit.certificates.reading import CertificateFacts
from meshkit.cli.terminal import print_json
from meshkit.errors import InvalidArgument
from meshkit.rpc.policy import Peer, Role

DEFAULT_DAYS = 90
TABLE_WIDTH = 150


def create_certificates(
    folder: Path, names: Mapping[Role, Sequence[str]], *, days: int = DEFAULT_DAYS, as_json: bool = False
) -> None:
    """Make what is missing in `folder`, and say what was made and what was kept.

    names: of the peers of each role. days: that new certificates are valid.

    Raises:
        InvalidArgument: nobody is named, or by a name of no proper form, or `days` is no number of days.
        FailedPrecondition: the folder cannot be used.
    """
    peers = [Peer(role, name) for role, given in names.items() for name in given]
    if not peers:
        raise InvalidArgument(
            "no certificate was asked for; name at least one of --gateway, --scheduler, --worker, --operator",
            field="--worker",
        )
    _tell(CertificateFolder(folder).create(peers, lifetime=_lifetime(days)), as_json=as_json)


def rotate_certificates(
    folder: Path,
    *,
    new_authority: bool = False,
    retire: bool = False,
    days: int = DEFAULT_DAYS,
    as_json: bool = False,
) -> None:
    """New keys and certificates for everybody in `folder`.

    new_authority: by a new authority, beside which the former one is trusted. retire: instead of all that,
    trust the present authority alone.

    Raises:
        InvalidArgument: both are wanted at once, or `days` is no number of days.
        FailedPrecondition: the folder cannot be used, or a former authority's certificate is still in it.
    """
    if retire and new_authority:
        raise InvalidArgument(
            "--retire ends a change of the authority that --authority begins; services must have read the "
            "new certificates in between",
            field="--retire",
        )
    opened = CertificateFolder(folder)
    made = opened.retire() if retire else opened.rotate(lifetime=_lifetime(days), new_authority=new_authority)
    _tell(made, as_json=as_json)


def show_certificates(folder: Path, *, as_json: bool = False) -> None:
    """Print what the certificates of `folder` say.

    Raises:
        InvalidArgument: one of them cannot be read.
    """
    described = {name: _describe(facts) for name, facts in CertificateFolder(folder).describe().items()}
    if as_json:
        print_json({"certificates": [{"folder": name, **facts} for name, facts in described.items()]})
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("folder", "role", "name", "from", "until", "serial", "fingerprint (SHA-256)"):
        table.add_column(column, no_wrap=True)
    for name, facts in described.items():
        table.add_row(
            name, facts["role"], facts["name"], facts["from"], facts["until"], facts["serial"][:16],
            facts["fingerprint"][:32],
        )  # fmt: skip
    Console(highlight=False, width=max(Console().width, TABLE_WIDTH)).print(table)


def _describe(facts: CertificateFacts) -> dict[str, Any]:
    return {
        "subject": facts.subject,
        "role": facts.peer.role.value if facts.peer else "",
        "name": facts.peer.name if facts.peer else "",
        "serial": facts.serial,
        "from": facts.not_before.isoformat(),
        "until": facts.not_after.isoformat(),
        "fingerprint": facts.fingerprint,
        "authority_fingerprint": facts.authority_fingerprint,
    }


def _lifetime(days: int) -> timedelta:
    if not 1 <= days <= 3650:
        raise InvalidArgument(f"--days is {days}; from 1 to 3650 are allowed", field="--days")
    return timedelta(days=days)


def _tell(made: Made, *, as_json: bool) -> None:
    if as_json:
        print_json({"written": list(made.written), "kept": list(made.kept)})
        return
    for word, names in (("written", made.written), ("kept", made.kept)):
        for name in names:
            print(f"{word} {name}")
