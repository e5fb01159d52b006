"""Certificates, keys and authorities on disk: of `chipmesh certs create`, or named by a configuration."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from meshkit.certificates.reading import is_signed_by, peers_of, read_certificates
from meshkit.cli.doctor.facts import CertificateFacts, Target
from meshkit.errors import MeshError

CERTIFICATE, KEY, AUTHORITY = "certificate.pem", "key.pem", "authority.pem"
AUTHORITY_KEY = "authority.key"


@dataclass(frozen=True)
class CertificateFiles:
    """One set of files, and whose it must be. authority: None where a public listener shows it to anybody."""

    certificate: Path
    key: Path
    authority: Path | None
    role: str | None = None
    name: str | None = None
    users: tuple[str, ...] = ()


def sets_in(folder: Path) -> Iterator[CertificateFiles]:
    """A folder of one set, or one as `certs create` writes it: a folder ROLE-NAME for each."""
    for each in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        if (each / CERTIFICATE).exists() or (each / KEY).exists():
            yield CertificateFiles(each / CERTIFICATE, each / KEY, each / AUTHORITY)


def sets_of(targets: Iterable[Target]) -> Iterator[CertificateFiles]:
    """What configurations name; of workers the name is known, too, which their peers check."""
    for target in targets:
        users = (target.name, target.executor_name) if target.kind == "worker" else (target.name,)
        tls, public = target.config.get("tls"), target.config.get("listen_tls")
        if tls:
            certificate, key, authority = (Path(tls[field]) for field in ("certificate", "key", "authority"))
            name = target.name if target.kind == "worker" else None
            yield CertificateFiles(certificate, key, authority, role=target.kind, name=name, users=users)
        if public:
            yield CertificateFiles(Path(public["certificate"]), Path(public["key"]), None, users=users)


def read_set(files: CertificateFiles) -> CertificateFacts:
    """One set; what cannot be read is told as its error."""
    facts = CertificateFacts(
        str(files.certificate.parent),
        is_public=files.authority is None,
        expected_role=files.role,
        expected_name=files.name,
        users=files.users,
    )
    try:
        certificate = read_certificates(files.certificate)[0]
        key_matches = _is_key_of(files.key, certificate)
        mode = stat.S_IMODE(files.key.stat().st_mode)
        authorities = read_certificates(files.authority) if files.authority is not None else []
    except (MeshError, OSError, ValueError, TypeError) as error:
        return replace(facts, error=_one_sentence(error))
    peers = peers_of(certificate)
    return replace(
        facts,
        subject=certificate.subject.rfc4514_string(),
        role=peers[0].role.value if len(peers) == 1 else None,
        name=peers[0].name if len(peers) == 1 else None,
        dns_names=_dns_names(certificate),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        key_matches=key_matches,
        key_mode=mode,
        key_file=str(files.key),
        authority_matches=files.authority is None
        or any(is_signed_by(certificate, each) for each in authorities),
    )


def read_authority(folder: Path) -> CertificateFacts | None:
    """The authority of a folder of `certs create`, and its key, where it is there; None without one."""
    bundle, key = folder / AUTHORITY, folder / AUTHORITY_KEY
    if not bundle.exists() or (folder / CERTIFICATE).exists():
        return None
    try:
        newest = max(read_certificates(bundle), key=lambda each: each.not_valid_after_utc)
        mode = stat.S_IMODE(key.stat().st_mode) if key.exists() else 0o600
    except (MeshError, OSError) as error:
        return CertificateFacts(str(folder), error=_one_sentence(error), is_authority=True)
    return CertificateFacts(
        str(folder),
        subject=newest.subject.rfc4514_string(),
        not_before=newest.not_valid_before_utc,
        not_after=newest.not_valid_after_utc,
        key_mode=mode,
        key_file=str(key),
        is_authority=True,
    )


def _is_key_of(file: Path, certificate: x509.Certificate) -> bool:
    # Of any kind: a public listener's certificate may be of another authority than ours.
    key = load_pem_private_key(file.read_bytes(), password=None)
    return bool(key.public_key() == certificate.public_key())


def _dns_names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.DNSName))


def _one_sentence(error: Exception) -> str:
    if isinstance(error, MeshError):
        return error.message
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
