"""Certificates and keys out of PEM files, and what a certificate says."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from meshkit.certificates.issuing import KeyedCertificate
from meshkit.config import TlsConfig
from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.rpc.peers import read_uri
from meshkit.rpc.policy import Peer, Role


@dataclass(frozen=True)
class CertificateFacts:
    """What people and checks want to know of one certificate. peer: None where it names none of ours.

    serial: hexadecimal. fingerprint: SHA-256, hexadecimal.
    """

    subject: str
    peer: Peer | None
    serial: str
    not_before: datetime
    not_after: datetime
    fingerprint: str
    authority_fingerprint: str = ""


def read_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates of a PEM file, at least one.

    Raises:
        InvalidArgument: it cannot be read, or holds none.
    """
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path}: no certificate can be read there: {error}", field="certificate"
        ) from error


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a PEM file.

    Raises:
        InvalidArgument: it cannot be read, or holds no elliptic-curve key without password.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(f"{path}: no key can be read there: {error}", field="key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidArgument(f"{path}: holds a key of another kind than EC", field="key")
    return key


def read_keyed(certificate: Path, key: Path) -> KeyedCertificate:
    """A certificate, the first one of its file, with its key.

    Raises:
        InvalidArgument: one of them cannot be read.
        FailedPrecondition: they do not belong together.
    """
    found = KeyedCertificate(read_certificates(certificate)[0], read_key(key))
    if found.certificate.public_key() != found.key.public_key():
        raise FailedPrecondition(f"{key} is not the key of {certificate}", field="key", reason="KEY_MISMATCH")
    return found


def read_peer(certificate: Path) -> Peer:
    """Whom the certificate of a file names.

    Raises:
        InvalidArgument: it cannot be read, or names nobody of ours, or several.
    """
    peers = peers_of(read_certificates(certificate)[0])
    if len(peers) != 1:
        raise InvalidArgument(
            f"{certificate} names {len(peers)} peers; it must have one URI of the form chipmesh://ROLE/NAME",
            field="certificate",
        )
    return peers[0]


def check_own(tls: TlsConfig | None, role: Role, *, name: str | None = None) -> Peer | None:
    """Whom a service's own certificate names; None without one. Others would refuse it without saying why.

    Raises:
        InvalidArgument: it cannot be read, or is that of another role or, where `name` is given, of another
            name.
    """
    if tls is None:
        return None
    peer = read_peer(tls.certificate)
    if peer.role is not role or name not in (None, peer.name):
        raise InvalidArgument(
            f"tls.certificate: {tls.certificate} is that of {peer}, and this is {Peer(role, name or '')}; "
            f"`chipmesh certs create DIR --{role.value} {name or 'NAME'}` makes one",
            field="tls.certificate",
        )
    return peer


def peers_of(certificate: x509.Certificate) -> list[Peer]:
    """Every peer of a mesh that a certificate names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return [peer for uri in uris if (peer := read_uri(uri)) is not None]


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether `authority` has signed it."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def describe_certificate(certificate: x509.Certificate) -> CertificateFacts:
    """What one certificate says."""
    peers = peers_of(certificate)
    return CertificateFacts(
        subject=certificate.subject.rfc4514_string(),
        peer=peers[0] if len(peers) == 1 else None,
        serial=f"{certificate.serial_number:x}",
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )
