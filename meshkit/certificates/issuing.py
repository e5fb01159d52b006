"""Authorities and leaves as X.509 (EC P-256): a leaf says which role its holder has, and its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshkit.errors import InvalidArgument
from meshkit.rpc.peers import peer_uri, server_name
from meshkit.rpc.policy import Peer

# Hosts' clocks differ: what was made now must be valid on one that is late.
_BACKDATED = timedelta(minutes=5)
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_MOST_NAME = 200


@dataclass(frozen=True)
class KeyedCertificate:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """As a file holds it."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """As a file holds it: PKCS#8, no password."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def check_name(name: str, *, field: str) -> None:
    """A name stands in a DNS name, where `*` would mean everybody.

    Raises:
        InvalidArgument: it has another form.
    """
    if len(name) > _MOST_NAME or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{field} is {name!r}; expected lower-case letters, digits, '-' and '.', as in a host's name, "
            f"{_MOST_NAME} characters at most",
            field=field,
        )


def make_authority(*, lifetime: timedelta, now: datetime | None = None) -> KeyedCertificate:
    """A new authority, signed by itself, that may sign leaves only."""
    now = now or datetime.now(timezone.utc)
    key = ec.generate_private_key(ec.SECP256R1())
    # Different each time: while one takes another's place, a verifier finds the right one by its name.
    serial = x509.random_serial_number()
    name = x509.Name([
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "chipmesh"),
        x509.NameAttribute(NameOID.COMMON_NAME, f"chipmesh authority {serial & 0xFFFFFFFF:08x}"),
    ])  # fmt: skip
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), serial)
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyedCertificate(certificate, key)


def make_leaf(
    peer: Peer, *, authority: KeyedCertificate, lifetime: timedelta, now: datetime | None = None
) -> KeyedCertificate:
    """A new key and its certificate for one peer; it never outlives its authority.

    It serves and dials: a worker does both. Beside the role's DNS name it has the peer's own, by which a
    scheduler asks for one worker and no other.
    """
    now = now or datetime.now(timezone.utc)
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    name = x509.Name([
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "chipmesh"),
        x509.NameAttribute(NameOID.COMMON_NAME, f"{peer.role.value} {peer.name}"[:64]),
    ])  # fmt: skip
    names = [
        x509.UniformResourceIdentifier(peer_uri(peer.role, peer.name)),
        x509.DNSName(server_name(peer.role)),
        x509.DNSName(server_name(peer.role, peer.name)),
    ]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder(issuer.subject, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(min(now + lifetime, issuer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    return KeyedCertificate(certificate, key)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
